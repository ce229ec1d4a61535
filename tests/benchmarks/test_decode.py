"""Bytes that a decoding step must read."""

from __future__ import annotations

from benchmarks.decode import Transformers
from inference_svc.models import loader


def test_weights_count_as_wide_as_they_are_kept_and_the_embedding_once() -> None:
    theirs = Transformers("demo")
    weights = sum(p.numel() for p in loader.load("demo").model.parameters())
    assert weights < theirs.step_bytes <= 4.1 * weights
