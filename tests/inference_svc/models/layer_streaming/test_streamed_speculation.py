"""A streamed model and its copy at 4 bits, which stays in memory: answers are those without, and it is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsidecar.errors import ConfigurationError

from inference_svc.models.layer_streaming import streamed_model
from inference_svc.models.layer_streaming.residency_plan import StreamingOptions, reserved_bytes
from inference_svc.models.layer_streaming.size_estimate import estimate_sizes
from inference_svc.models.loader import load, recipe_of_shape
from inference_svc.server.python_api import Engine
from inference_svc.server.runtime import Runtime
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.spec_decode.chance import free_rows


def runtime_of(engine: Engine) -> Runtime:
    return engine._runtime


def answers(engine: Engine) -> tuple[list[list[int]], int, int]:
    """Tokens of some requests, greedy and drawn; how many were guessed, and how many of these were right."""
    asked = [
        (prompt(i, 30 + 17 * i), {"max_tokens": 24, "ignore_eos": True, "seed": i, "temperature": float(i % 2)})
        for i in range(4)
    ]
    found = engine.generate_many(asked)
    runtime_of(engine).engine.check_integrity()
    return [one.token_ids for one in found], sum(f.draft_tokens for f in found), sum(f.accepted_tokens for f in found)


@pytest.mark.parametrize("mode", ["full_stream", "ffn_only_stream", "partial_resident"])
def test_answers_are_those_without(home: Path, mode: str) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "stream": mode, "pool_bytes": "32MiB", "stream_slots": 2}
    settings |= {"keep_first": 1} if mode == "partial_resident" else {}
    with Engine.from_pretrained("demo", cache=None, **settings) as plain:
        want, guessed, _ = answers(plain)
        assert not guessed
    with Engine.from_pretrained("demo", cache=None, speculate="draft", draft_model="self", **settings) as engine:
        inner = runtime_of(engine).engine
        inner.speculator.costs = free_rows()
        assert inner.loaded.streamed is not None
        assert inner.loaded.streamed.read_ahead is not None
        got, guessed, right = answers(engine)
        assert got == want
        assert 0 < right <= guessed
        stats = inner.speculator.stats
        assert (stats.draft_tokens, stats.accepted_tokens) == (guessed, right)


def test_the_copy_is_counted_before_it_is_decided_what_stays() -> None:
    recipe = recipe_of_shape("shape:qwen2.5-0.5b", torch.float32, 16)
    asked = StreamingOptions("auto", pool_bytes=1 << 20, copy_bits=4)
    size = estimate_sizes(replace(recipe, bits=4)).sizes.all
    found = streamed_model.with_copy(recipe, asked)
    assert reserved_bytes(found) - reserved_bytes(asked) == size > 100 << 20
    assert streamed_model.with_copy(recipe, found) == found


def test_what_fits_only_without_the_copy_is_streamed_with_it(home: Path) -> None:
    recipe = recipe_of_shape("shape:qwen2.5-0.5b", torch.float32, 16)
    asked, whole = StreamingOptions("auto", pool_bytes=1 << 20), estimate_sizes(recipe)
    free = max(whole.kept, whole.dense) + reserved_bytes(asked) + (1 << 20)
    assert not streamed_model.streaming_needed(recipe, 16, asked, free)
    assert streamed_model.streaming_needed(recipe, 16, replace(asked, copy_bits=4), free)
    # Where not even that fits, it says so.
    small = estimate_sizes(replace(recipe, bits=4)).sizes.all
    with pytest.raises(ConfigurationError, match="of adapters and draft"):
        streamed_model.streaming_needed(recipe, 16, replace(asked, copy_bits=4), small)


def test_a_copy_of_a_streamed_model_is_the_copy_of_one_in_memory(home: Path) -> None:
    """Its file has the very weights that are quantized from those in memory, so the names of both are equal."""
    resident = load("demo", dtype="float32", weights=4)
    made = load(
        "demo", dtype="float32", weights=4, stream=StreamingOptions("partial_resident", keep_first=resident.layers)
    )
    assert made.weights == resident.weights
    assert made.streamed is not None
    assert made.streamed.read_ahead is None
    assert made.streamed.residency.mode == "full_resident"
    assert made.streamed.residency.streamed_bytes == 0
