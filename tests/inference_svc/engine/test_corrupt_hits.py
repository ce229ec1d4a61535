"""A stored chunk that holds NaN is dropped where it was loaded, and its prefix is computed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inference_svc import Engine
from inference_svc.kv_client import chunk_saver
from inference_svc.kv_pool.block_table import PAGE_TOKENS

OPTIONS: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 3000) for _ in range(tokens)]


def settled(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    inner, cache = engine._runtime.engine, engine._runtime.cache
    while inner.load != (0, 0, 0) or (cache is not None and cache._loads):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    inner.check_integrity()


@pytest.fixture(params=[0, 8], ids=["without residents", "with residents"])
def residents(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def engine(residents: int) -> Iterator[Engine]:
    settings: dict[str, Any] = {"threads": 1, "pool_bytes": 64 << 20, "resident_sequences": residents}
    with Engine.from_pretrained("demo", arena_bytes="64MiB", cache_timeout_ms=20_000, **settings) as found:
        assert found._runtime.cache is not None
        assert all(daemon.wait(60) for daemon in found._runtime.cache._daemons.values())
        yield found


@pytest.mark.parametrize("tokens", [300, 1200])
def test_a_corrupt_chunk_costs_one_prefill_and_is_deleted(
    engine: Engine, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a valid checksum, as an archive could bring it; of the longer prompt the forward begins before all layers
    are there."""
    ids, pack = prompt(1, tokens), chunk_saver.pack_chunk

    def spoil(keys: Any, values: Any, slots: Any, header: Any, payload: memoryview) -> None:
        pack(keys, values, slots, header, payload)
        if header.start_position > 100:
            payload[:64] = b"\xff" * 64

    monkeypatch.setattr(chunk_saver, "pack_chunk", spoil)
    engine.generate(ids, **OPTIONS)
    settled(engine)
    monkeypatch.setattr(chunk_saver, "pack_chunk", pack)
    inner, cache = engine._runtime.engine, engine._runtime.cache
    assert cache is not None
    while inner.resident_sequences:
        inner.between_steps(inner._core.prefix_cache.evict)
    plain = engine.generate([*ids, 5], skip_cache=True, **OPTIONS)
    found = engine.generate([*ids, 5], **OPTIONS)
    assert found.token_ids == plain.token_ids
    assert found.cached_tokens == 0
    settled(engine)
    assert inner.stats.corrupt_hits == 1
    assert "corrupt" in [kind for kind, _, _ in inner.stats.misses.as_tuples()]
    assert cache.stats.corrupt_chunks >= 1
    assert inner.stats.failed == cache.stats.failures == 0
    assert inner.free_pages == inner.pool.pages
    assert inner.pool.keys.isfinite().all(), "whoever gets the pages next would read NaN"
    again = engine.generate([*ids, 5], **OPTIONS)
    assert again.token_ids == plain.token_ids
    assert again.cached_tokens == len(ids)
    assert inner.stats.corrupt_hits == 1


@pytest.mark.parametrize("residents", [8])
def test_corrupt_residents_are_dropped_with_all_that_begin_so(engine: Engine) -> None:
    inner, ids = engine._runtime.engine, prompt(2, 200)
    one, other = ids + prompt(3, 60), ids + prompt(4, 60)
    for tokens in (one, other, prompt(5, 100)):
        engine.generate(tokens, **OPTIONS)
        settled(engine)
    assert inner.resident_sequences == 3
    cache = engine._runtime.cache
    assert cache is not None
    with torch.inference_mode():
        slots = inner.resident(0).table.slots(2 * PAGE_TOKENS, 3 * PAGE_TOKENS)
        inner.between_steps(lambda: inner.pool.values[1].index_fill_(1, torch.from_numpy(slots), float("nan")))
    plain = engine.generate([*one, 7], skip_cache=True, **OPTIONS)
    assert engine.generate([*one, 7], **OPTIONS).token_ids == plain.token_ids
    settled(engine)
    assert inner.stats.corrupt_hits == 1
    assert inner.pool.values.isfinite().all()


def test_a_model_that_computes_nan_by_itself_fails_as_before(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reused is finite: computing it again would change nothing."""
    ids, inner = prompt(6, 200), engine._runtime.engine
    engine.generate(ids, **OPTIONS)
    settled(engine)
    compute = inner._core.compute
    monkeypatch.setattr(inner._core, "compute", lambda spans: compute(spans) * float("nan"))
    with pytest.raises(Exception, match="computed NaN or infinity"):
        engine.generate([*ids, 5], **OPTIONS)
    assert inner.stats.corrupt_hits == 0
    assert inner.stats.failed == 1
