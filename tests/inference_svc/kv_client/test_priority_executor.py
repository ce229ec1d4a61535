"""Loads, copies and saves of a worker do not wait for each other, and nobody loads for who is gone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kvkernels import LoadedLayers
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_transfer.session import Session

from inference_svc import Engine
from inference_svc.engine.engine import Engine as InnerEngine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_client import daemon_connector, pool_writer
from inference_svc.kv_client.priority_executor import Job, PriorityExecutor
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import layerwise_load
from inference_svc.models.loader import load
from inference_svc.sequence.kv_connector import LoadCallback, LoadResult, NullKVConnector
from inference_svc.sequence.sequence import Sequence
from inference_svc.server.python_api import Result
from tests.inference_svc.server.test_load import Request, idle

OPTIONS: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}
LONG = 500


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 3000) for _ in range(tokens)]


SLOW, OTHER = prompt(1, 600), prompt(2, 300)


@pytest.fixture(scope="module")
def started() -> Iterator[Engine]:
    settings: dict[str, Any] = {"threads": 1, "pool_bytes": 64 << 20, "resident_sequences": 0}
    with Engine.from_pretrained("demo", cache_timeout_ms=20_000, **settings) as found:
        wait_attached(found)
        for ids in (SLOW, OTHER):
            found.generate(ids, **OPTIONS)
        eventually(lambda: found._runtime.engine.load == (0, 0, 0))
        yield found


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def engine(started: Engine) -> Engine:
    """An attached and idle one that has not learnt from another test's slow loads that loading does not pay."""
    cache, inner = started._runtime.cache, started._runtime.engine
    # A sequence that is still being saved has pages that the next one would share, and load nothing.
    eventually(lambda: inner.load == (0, 0, 0) and inner.free_pages == inner.pool.pages)
    assert cache is not None
    wait_attached(started)
    cache._cost_model.reset_loads()
    return started


def wait_attached(engine: Engine) -> None:
    assert engine._runtime.cache is not None
    (daemon,) = engine._runtime.cache._daemons.values()
    assert daemon.wait(60), "no session with the daemon"


class Held:
    """Calls for long prompts, which wait until the test lets them continue."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Semaphore(0), threading.Event()

    def hold(self) -> None:
        self.asked.release()
        assert self.let_go.wait(60)

    def wait(self) -> None:
        assert self.asked.acquire(timeout=20)


@pytest.fixture
def slow_match(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held, match = Held(), Session.match

    def slow(self: Session, request: pb.MatchRequest, timeout: float) -> pb.MatchResponse:
        if len(request.token_ids) > LONG:
            held.hold()
        return match(self, request, timeout)

    monkeypatch.setattr(Session, "match", slow)
    yield held
    held.let_go.set()


def beside(engine: Engine, held: Held, ids: list[int]) -> Result:
    """The answer to a prompt while a long one's call does not come back."""
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(engine.generate, [*SLOW, 5], **OPTIONS)
        try:
            held.wait()
            found = threads.submit(engine.generate, ids, **OPTIONS).result(20)
            assert not long.done()
        finally:
            held.let_go.set()
        assert long.result(20).cached_tokens == len(SLOW)
    return found


def test_a_slow_match_delays_no_other_hit(engine: Engine, slow_match: Held) -> None:
    assert beside(engine, slow_match, [*OTHER, 7]).cached_tokens == len(OTHER)


def test_a_prompt_computes_what_it_shares_with_a_slow_load(engine: Engine, slow_match: Held) -> None:
    result = beside(engine, slow_match, SLOW[:64] + prompt(3, 30))
    assert result.cached_tokens in (0, 64)  # its own load may find the beginning
    engine_ = engine._runtime.engine
    computing = engine_._core.prefill_budget.seconds(94)
    assert computing is not None
    assert result.timings["queue_ms"] < 2e3 * computing + 5000, "it waited for longer than computing takes"


def test_cancelled_loads_give_pages_and_leases_back_and_delay_nobody(engine: Engine, slow_match: Held) -> None:
    inner = engine._runtime.engine
    calls = [engine._submit([*SLOW, i], OPTIONS) for i in range(4)]
    for _ in calls:
        slow_match.wait()
    for call in calls:
        inner.cancel(call.sequence)
    eventually(lambda: inner.load == (0, 0, 0) and inner.free_pages == inner.pool.pages)  # the calls still wait
    assert engine.generate([*OTHER, 8], **OPTIONS).cached_tokens == len(OTHER)
    loaded = engine._runtime.cache.stats.loaded_bytes  # type: ignore[union-attr]
    slow_match.let_go.set()
    eventually(lambda: engine.cache_stats()["daemon"]["leases"] == 0 and not engine._runtime.cache._loads)  # type: ignore[union-attr]
    assert engine._runtime.cache.stats.loaded_bytes == loaded  # type: ignore[union-attr]
    assert engine.generate([*SLOW, 9], **OPTIONS).cached_tokens == len(SLOW)


def test_a_cancelled_load_that_waits_for_its_copy_is_not_copied(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, read, reads = Held(), Session.read, list[bytes]()

    def slow(self: Session, lease_id: bytes, *rest: Any) -> Any:
        reads.append(lease_id)
        held.hold()
        return read(self, lease_id, *rest)

    monkeypatch.setattr(Session, "read", slow)
    inner, cache = engine._runtime.engine, engine._runtime.cache
    assert cache is not None
    first = engine._submit([*OTHER, 1], OPTIONS)
    held.wait()
    second = engine._submit([*SLOW, 1], OPTIONS)
    eventually(lambda: len(cache._copies.jobs) == 2)
    inner.cancel(second.sequence)
    inner.cancel(first.sequence)
    held.let_go.set()
    eventually(lambda: inner.load == (0, 0, 0) and not cache._loads)
    assert len(reads) == 1
    assert cache.stats.failures == 0
    eventually(lambda: engine.cache_stats()["daemon"]["leases"] == 0)


def test_copying_ends_between_layers_when_the_request_is_gone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, cache = engine._runtime.engine, engine._runtime.cache
    assert cache is not None
    unpack, copied, calls = pool_writer.unpack_chunks, list[range](), list[Any]()
    submitted = threading.Event()

    def counted(*arguments: Any) -> Iterator[LoadedLayers]:
        for loaded in unpack(*arguments):
            copied.append(loaded.layers)
            assert submitted.wait(20)
            calls[0].sequence.cancelled.set()
            yield loaded

    monkeypatch.setattr(pool_writer, "unpack_chunks", counted)
    monkeypatch.setattr(layerwise_load, "LAYER_GROUP", 1)
    calls.append(engine._submit([*SLOW, 2], OPTIONS))
    submitted.set()
    inner.cancel(calls[0].sequence)
    eventually(lambda: inner.load == (0, 0, 0) and not cache._loads)
    assert len(copied) <= 1 < inner.loaded.layers
    assert cache.stats.failures == 0
    inner.check_integrity()
    assert inner.free_pages == inner.pool.pages


def test_what_was_copied_while_the_worker_hung_is_computed_instead(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may have ended the session, and given the chunks' memory to others."""
    cache = engine._runtime.cache
    assert cache is not None
    unpack, (daemon,) = pool_writer.unpack_chunks, cache._daemons.values()

    def hung(*arguments: Any) -> Iterator[LoadedLayers]:
        for loaded in unpack(*arguments):
            session = daemon.session
            assert session is not None
            session.last_acked_at = time.monotonic() - 2.1 * session.heartbeat_seconds
            yield loaded

    want = engine.generate([*OTHER, 3], skip_cache=True, **OPTIONS)
    for ids, cached in (([*OTHER, 3], 0), ([*SLOW, 3], len(SLOW))):  # of the second the forward had begun
        failures = cache.stats.failures
        monkeypatch.setattr(pool_writer, "unpack_chunks", hung)
        assert daemon.wait(60)
        result = engine.generate(ids, **OPTIONS)
        assert cache.stats.failures > failures  # the save of this answer may fail, too: its session has ended
        assert result.cached_tokens in (0, cached)
        monkeypatch.setattr(pool_writer, "unpack_chunks", unpack)
        assert daemon.wait(60)
    assert engine.generate([*OTHER, 3], **OPTIONS).token_ids == want.token_ids


class SlowLoads(NullKVConnector):
    """Loads that wait until the test lets them continue, with an expected duration in seconds."""

    def __init__(self, expected: float) -> None:
        self.expected = expected
        self.loads: list[tuple[Sequence, LoadCallback]] = []
        self.asked = threading.Event()

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        if sequence.request.num_prompt_tokens < LONG:
            return False
        self.loads.append((sequence, done))
        self.asked.set()
        return True

    def load_seconds(self, tokens: int) -> float:
        return self.expected

    def end(self) -> None:
        for sequence, done in self.loads:
            done(sequence, LoadResult())


def shared_with_a_load(expected: float, row_seconds: float) -> tuple[InnerEngine, SlowLoads, Request, Request]:
    """An engine in which a long prompt is being loaded, and a short one that shares its beginning was submitted."""
    cache, loaded = SlowLoads(expected), load("demo", dtype="float32")
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 4096, loaded.dtype, loaded.device)
    engine = InnerEngine(loaded, pool, cache, EngineLimits(prefix_cache_sequences=0))
    engine._core.prefill_budget._row = row_seconds
    long, short = Request(SLOW, 2), Request(SLOW[:64] + prompt(4, 30), 2)
    engine.submit(long.sequence)
    assert cache.asked.wait(20)
    engine.submit(short.sequence)
    return engine, cache, long, short


def test_a_prompt_waits_for_a_load_that_is_faster_than_computing() -> None:
    engine, cache, long, short = shared_with_a_load(expected=0.0, row_seconds=100.0)
    eventually(lambda: engine._core.admission.wake_at is not None)
    assert not short.outputs
    cache.end()
    long.tokens()
    short.tokens()
    assert short.sequence.usage.num_pool_hits >= 64, "it was computed again"
    engine.stop()


def test_a_prompt_does_not_wait_for_a_load_that_is_slower_than_computing() -> None:
    engine, cache, long, short = shared_with_a_load(expected=600.0, row_seconds=0.2)
    short.tokens()
    assert short.sequence.timings.queue_ms < 64 * 200, "it waited"
    cache.end()
    long.tokens()
    engine.stop()


def test_a_prompt_waits_no_longer_than_computing_takes() -> None:
    engine, cache, long, short = shared_with_a_load(expected=0.0, row_seconds=0.005)
    short.tokens()  # although no letter comes
    assert short.sequence.timings.queue_ms > 250, "it did not wait at all"
    cache.end()
    long.tokens()
    idle(engine)
    engine.stop()


def job(done: list[int], number: int, started: threading.Event, go_on: threading.Event) -> Callable[[Job], None]:
    def work(_: Job) -> None:
        started.set()
        assert go_on.wait(20)
        done.append(number)

    return work


def test_a_lane_keeps_its_order_but_for_what_is_urgent() -> None:
    lane, done, started, go_on = PriorityExecutor("test"), list[int](), threading.Event(), threading.Event()
    sequence = Request([1, 2, 3], 1).sequence
    jobs = [lane.submit(sequence, job(done, i, started, go_on)) for i in range(4)]
    assert started.wait(20)
    lane.prioritize([jobs[2]])
    assert lane.jobs == jobs
    go_on.set()
    lane.shutdown()
    assert done == [0, 2, 1, 3]
    assert not lane.jobs
    assert all(job.finished.is_set() for job in jobs)


def test_storing_gives_way_to_copies_unless_a_load_waits_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_connector, "_MAX_YIELD_SECONDS", 60.0)
    cache, inner = engine._runtime.cache, engine._runtime.engine
    assert cache is not None
    # So short that no other request goes on in its pages.
    started, go_on, ids = threading.Event(), threading.Event(), prompt(5, 20)
    copying = cache._copies.submit(Request([1], 1).sequence, job([], 0, started, go_on))
    stored = cache.stats.stored_chunks
    engine.generate(ids, **OPTIONS)
    eventually(lambda: inner.load == (0, 0, 1))
    assert cache.stats.stored_chunks == stored, "it was stored while a copy was under way"
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(engine.generate, ids, **OPTIONS)
        eventually(lambda: cache.stats.stored_chunks > stored)  # since that prompt's load waits for it
        assert not copying.finished.is_set()
        go_on.set()
        assert again.result(20).cached_tokens == len(ids) - 1
