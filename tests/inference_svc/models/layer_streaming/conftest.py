"""Temporary folder for the files of streamed models, and reference results of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.loader import LoadedModel

IDS = list(range(10, 110))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Temporary folder of converted models, for one test module."""
    folder, before = tmp_path_factory.mktemp("data"), os.environ.get("XDG_DATA_HOME")
    os.environ["XDG_DATA_HOME"] = str(folder)
    yield folder / "kvsidecar" / "models" / "converted"
    if before is None:
        del os.environ["XDG_DATA_HOME"]
    else:
        os.environ["XDG_DATA_HOME"] = before


def computed(loaded: LoadedModel, decoder: Decoder | None = None) -> list[Tensor]:
    """Return a model's logits and the pool's keys.

    The prompt is computed in pieces beside another sequence; some decode steps follow.
    """
    decoder = decoder or Decoder(loaded)
    device = loaded.device
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 512, loaded.dtype, device)
    tables = [pool.allocate(128), pool.allocate(64)]
    assert tables[0] is not None
    assert tables[1] is not None
    found, at = [], 0
    for count in (64, 30, 6):
        spans = [
            forward_batch.SequenceSlice(IDS[at : at + count], at, tables[0], at + count == len(IDS)),
            forward_batch.SequenceSlice(IDS[at // 8 : at // 8 + 3], at // 8, tables[1], True),
        ]
        found.append(decoder(forward_batch.build_batch(spans, pool, device)))
        at += count
    for step in range(3):
        span = forward_batch.SequenceSlice([int(found[-1][0].argmax())], len(IDS) + step, tables[0], True)
        found.append(decoder(forward_batch.build_batch([span], pool, device)))
    return [*found, pool.keys.clone()]
