"""Reuse inside the pool: what was computed stays until the room is needed, and changes no answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from benchmarks.node import Node
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import (
    MIN_SHARED_TOKENS,
    CachedSequence,
    CacheScope,
    PrefixCache,
    StoredPrefix,
    as_array,
)
from inference_svc.sequence.generation_request import CacheParams
from inference_svc.sequence.sequence import SequenceOutput
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request, idle, small_engine

Sink = Callable[[SequenceOutput], None]


def answer(engine: object, ids: list[int], length: int = 20, **use: object) -> tuple[list[int], int]:
    request = Request(ids, length)
    request.sequence.request = replace(request.sequence.request, cache=CacheParams(**use))
    engine.submit(request.sequence)  # type: ignore[attr-defined]
    tokens = request.tokens()
    idle(engine)  # type: ignore[arg-type]
    return tokens, request.sequence.usage.num_cached


def test_a_conversation_goes_on_in_its_own_pages() -> None:
    engine = small_engine(2048)
    ids = prompt(1, 90)
    want_all = []
    for turn in range(4):
        want, none = answer(engine, ids, read=False, write=False)
        got, cached = answer(engine, ids)
        assert (got, none) == (want, 0)
        # The last generated token was never computed.
        assert cached == (0 if turn == 0 else len(ids) - 1 - 25)
        want_all.append(got)
        ids = ids + got + prompt(2 + turn, 25)
    assert engine.resident_sequences == 1
    engine.check_integrity()
    engine.stop()


def test_a_request_that_keeps_nothing_leaves_what_it_went_on_from() -> None:
    engine = small_engine(2048)
    ids = prompt(1, 90)
    answer(engine, ids)
    for _ in range(2):
        assert answer(engine, ids + prompt(2, 25), write=False)[1] >= len(ids)
    engine.check_integrity()
    engine.stop()


def test_two_that_share_a_prefix_leave_each_other_alone() -> None:
    engine = small_engine(2048)
    system = prompt(1, 200)
    tails = [system + prompt(10 + i, 40) for i in range(4)]
    want = [answer(engine, ids, read=False, write=False)[0] for ids in tails]
    for _ in range(2):
        for ids, expected in zip(tails, want, strict=True):
            assert answer(engine, ids)[0] == expected
    assert answer(engine, tails[0])[1] == len(tails[0]) - 1
    engine.check_integrity()
    engine.stop()


def test_what_begins_alike_takes_no_second_room() -> None:
    engine = small_engine(2048)
    system = prompt(1, 320)
    answer(engine, system + prompt(9, 10), 2)
    pages = [engine.pool.free_pages]
    for i in range(3):
        assert answer(engine, system + prompt(10 + i, 10), 2)[1] >= 320
        pages.append(engine.pool.free_pages)
    own = -(-(10 + 2) // PAGE_TOKENS) + 1
    assert all(before - after <= own for before, after in pairwise(pages)), pages
    engine.check_integrity()
    engine.stop()


def test_when_room_is_short_pages_are_shared_and_residents_go() -> None:
    engine = small_engine(512)
    system = prompt(1, 200)
    tails = [system + prompt(10 + i, 30) for i in range(6)]
    want = [answer(engine, ids, read=False, write=False)[0] for ids in tails]
    for ids, expected in zip(tails * 2, want * 2, strict=True):
        got, cached = answer(engine, ids)
        assert got == expected
        engine.check_integrity()
    assert cached >= 192
    long = prompt(99, 500)
    assert answer(engine, long, 8)[1] == 0
    assert engine.resident_sequences == 1
    engine.check_integrity()
    engine.stop()


def test_the_least_recently_used_of_too_many_goes() -> None:
    pool = KVPool(1, 1, 2, 64 * PAGE_TOKENS, torch.float32, torch.device("cpu"))
    cache = PrefixCache(pool, 2)
    entries = []
    for i in range(3):
        table = pool.allocate(50)
        assert table is not None
        entries.append(CachedSequence(as_array(prompt(i, 50)), table, CacheScope(), StoredPrefix()))
    cache.insert(entries[0])
    cache.insert(entries[1])
    cache.touch(entries[0])
    cache.insert(entries[2])
    assert cache.entries == [entries[0], entries[2]]
    assert pool.references_match(cache.tables)


def test_a_common_prefix_is_read_once() -> None:
    engine = small_engine(8192, max_num_batched_tokens=64)
    system = prompt(1, 600)
    requests = [Request(system + prompt(10 + i, 20), 5) for i in range(6)]
    for request in requests:
        engine.submit(request.sequence)
    for request in requests:
        request.tokens()
    cached = sorted(r.sequence.usage.num_cached for r in requests)
    assert cached[0] == 0
    assert cached[1] > 600 - MIN_SHARED_TOKENS
    engine.stop()


def test_the_longest_known_prefix_goes_first_but_nobody_waits_for_ever() -> None:
    engine = small_engine(2048, max_num_seqs=1)
    known = prompt(1, 300)
    answer(engine, known)

    def ends(waited: float, seed: int) -> list[str]:
        """Which of two ends first: one that has waited for a few seconds, or one that comes now and is known."""
        reached, go_on, ended = threading.Event(), threading.Event(), list[str]()
        blocker = Request(prompt(50 + seed, 20), 5)

        def hold(output: SequenceOutput, sink: Sink = blocker.sequence.sink) -> None:
            sink(output)
            reached.set()
            assert go_on.wait(60)

        blocker.sequence.sink = hold  # the engine stands still until both are queued
        engine.submit(blocker.sequence)
        assert reached.wait(60)
        now, requests = time.perf_counter(), [blocker]
        for name, ids, arrived_at in (
            ("unknown", prompt(60 + seed, 300), now - waited),
            ("known", [*known, 7 + seed], now),
        ):
            request = Request(ids, 2)

            def note(output: SequenceOutput, name: str = name, sink: Sink = request.sequence.sink) -> None:
                if output.finish is not None:
                    ended.append(name)
                sink(output)

            request.sequence.sink = note
            request.sequence.request = replace(request.sequence.request, arrived_at=arrived_at)
            engine.submit(request.sequence)
            requests.append(request)
        go_on.set()
        for request in requests:
            request.tokens()
        return ended

    assert ends(0.0, 0) == ["known", "unknown"]
    # An older request counts its waiting time: 300 tokens are worth 150 ms.
    assert ends(10.0, 1) == ["unknown", "known"]
    engine.stop()


def test_tenants_do_not_share_pages() -> None:
    engine = small_engine(2048)
    ids = prompt(1, 200)
    assert answer(engine, ids, tenant_salt=b"a")[1] == 0
    assert answer(engine, ids, tenant_salt=b"b")[1] == 0
    assert answer(engine, ids, tenant_salt=b"a")[1] == 199
    engine.stop()


def test_what_a_request_may_not_store_is_not_kept() -> None:
    engine = small_engine(2048)
    ids = prompt(1, 200)
    assert answer(engine, ids, write=False)[1] == 0
    assert engine.resident_sequences == 0
    assert engine.pool.free_pages == engine.pool.pages
    engine.stop()


@pytest.mark.parametrize("bits", [16, 8])
def test_resident_and_stored_prefixes_join(bits: int) -> None:
    """One worker reads a beginning, another the whole; the first then takes the rest from the daemon."""
    ids = prompt(7, 700)
    with Node("demo", workers=2, storage_bits=bits, arena_bytes="128MiB", pool_bytes="64MiB") as node:
        first, second = node.client(0), node.client(1)
        want = second.generate(ids, max_tokens=20, temperature=0, skip_cache=True)
        first.generate(ids[:300], max_tokens=1)
        second.warm(ids)
        got = first.generate(ids, max_tokens=20, temperature=0)
        assert got.cached_tokens == 699
        assert got.timings["restore_ms"] > 0
        if bits == 16:
            assert got.token_ids == want.token_ids
        again = first.generate(ids, max_tokens=20, temperature=0)
        assert again.cached_tokens == 699
        assert again.timings["restore_ms"] == 0
        assert first.stats().resident_tokens >= 699
