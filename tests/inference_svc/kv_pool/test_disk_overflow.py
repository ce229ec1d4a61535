"""Contexts beyond the pool: the same answers, in pages of a file behind it, and nobody else hears of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvsidecar.errors import OverflowFailed, PromptExceedsPool, status_of

from benchmarks.node import Node
from inference_svc.engine import request_lifecycle
from inference_svc.kv_pool import disk_overflow
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.sequence.sequence import FinishReason, SequenceState
from inference_svc.server.python_api import Engine as Api
from inference_svc.server.worker_metrics import WorkerCollector
from inference_svc.server.worker_stats import worker_stats
from tests.inference_svc.server.test_load import Request, idle
from tests.inference_svc.windowed import Windowed, prompt, windowed

PLAIN = "LlamaForCausalLM"
POOL, BEYOND = 512, 2048
LONG = prompt(200, 1900)
# What a file system keeps of where blocks were.
METADATA = 64 << 10


def small(folder: Path, node: Node | None = None, beyond: int = BEYOND, **limits: int) -> Windowed:
    """An engine whose pool holds a quarter of what its overflow does."""
    return windowed(PLAIN, POOL, node, dtype=torch.bfloat16, overflow=(folder, beyond), **limits)


@pytest.fixture(scope="module")
def answers() -> Iterator[Windowed]:
    """What is right: the pool holds all."""
    large = windowed(PLAIN, dtype=torch.bfloat16)
    yield large
    large.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="64MiB") as node:
        yield node


def _shape(engine: Api) -> tuple[int, int, int, torch.dtype]:
    loaded = engine._runtime.engine.loaded
    return loaded.layers, loaded.kv_heads, loaded.head_dim, loaded.dtype


def right(answers: Windowed, ids: list[int], length: int = 20) -> list[int]:
    return answers.answer(ids, length, read=False, write=False)[0]


def on_disk(pool: KVPool) -> int:
    """Bytes of the file that have a place there."""
    assert pool.overflow is not None
    return os.fstat(pool.overflow._file).st_blocks * 512


# ---- answers --------------------------------------------------------------------------------------------------------


def test_four_times_the_pool_answers_as_an_unlimited_pool_does_and_others_go_on(
    tmp_path: Path, answers: Windowed
) -> None:
    others = [prompt(210 + i, 60 if i else 400) for i in range(6)]
    wanted, want = right(answers, LONG, 60), [right(answers, ids, 100) for ids in others]
    engine = small(tmp_path)
    assert engine.engine.context_length == BEYOND
    long = engine.request(LONG, 60)
    requests = [engine.request(ids, 100) for ids in others]
    assert long.tokens() == wanted
    assert [r.tokens() for r in requests] == want
    idle(engine.engine)
    engine.engine.check_integrity()
    assert long.sequence.usage.num_cached == 0
    assert engine.engine.free_overflow_pages == engine.engine.pool.overflow_pages
    # The next turn goes on where it lies, and who shares its beginning copies that.
    more = LONG + wanted + prompt(220, 30)
    assert engine.answer(more) == (right(answers, more), 1959)
    part = LONG[:300] + prompt(221, 30)
    assert engine.answer(part) == (right(answers, part), 300)
    engine.close()


def test_a_conversation_that_outgrows_the_pool_takes_with_it_what_it_has(tmp_path: Path, answers: Windowed) -> None:
    engine, ids = small(tmp_path), prompt(230, 300)
    got = right(answers, ids)
    assert engine.answer(ids)[0] == got
    ids = ids + got + prompt(231, 600)
    assert engine.answer(ids, 5) == (right(answers, ids, 5), 319)
    engine.close()


def test_an_answer_that_outgrows_the_pool_goes_on_in_the_overflow(tmp_path: Path, answers: Windowed) -> None:
    engine, ids = small(tmp_path), prompt(235, 200)
    request, other = engine.request(ids, 350), engine.request(prompt(236, 50), 100)
    assert request.tokens() == right(answers, ids, 350)
    assert other.tokens() == right(answers, prompt(236, 50), 100)
    assert request.sequence.usage.num_cached == 0, "what it says of the prompt is of the first time"
    assert engine.engine.stats.overflow_admissions == 1
    idle(engine.engine)
    engine.engine.check_integrity()
    engine.close()


def test_one_after_the_other_and_nobody_behind_them_waits(tmp_path: Path, answers: Windowed) -> None:
    prompts = [prompt(240 + i, 1500) for i in range(3)]
    engine = small(tmp_path)

    def submit() -> tuple[list[Request], list[Request]]:
        long = [engine.request(ids, 100) for ids in prompts]
        return long, [engine.request(prompt(250 + i, 40), 5) for i in range(20)]

    long, short = engine.engine.between_steps(submit)  # no answer ends before the last request waits
    assert [r.tokens() for r in short] == [right(answers, prompt(250 + i, 40), 5) for i in range(20)]
    assert [r.tokens() for r in long] == [right(answers, ids, 100) for ids in prompts]
    ends = [r.sequence.timestamps.first_token_at + r.sequence.timings.decode_ms / 1e3 for r in short]
    assert max(ends) < long[1].sequence.timestamps.first_token_at
    idle(engine.engine)
    engine.engine.check_integrity()
    assert engine.engine.stats.preemptions == 0
    engine.close()


def test_what_fits_in_neither_is_refused_with_the_numbers(tmp_path: Path, answers: Windowed) -> None:
    engine = small(tmp_path)
    other = engine.request(prompt(260, 50), 100)
    pages = engine.engine.pool.overflow_pages
    said = f"this worker's pool has 16 and its overflow {pages}, so at most {BEYOND} tokens are allowed"
    with pytest.raises(PromptExceedsPool, match=said):
        engine.request(prompt(261, BEYOND))
    assert other.tokens() == right(answers, prompt(260, 50), 100)
    engine.close()


def place_of(request: Request) -> str:
    if request.sequence.state is SequenceState.WAITING:
        return "waiting"
    return "answering" if request.outputs else "reading" if request.sequence.kv.num_computed else ""


def test_cancelled_it_gives_its_pages_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own thread cancels it between two steps, so that it cannot end before."""
    engine, places, requests = small(tmp_path), ["waiting", "reading", "answering"], list[Request]()
    step = engine.engine._core.step

    def cancel_and_step() -> None:
        sequence = requests[-1].sequence if requests else None
        if sequence is not None and not sequence.cancelled.is_set() and place_of(requests[-1]) == places[0]:
            places.pop(0)
            engine.engine.cancel(sequence)
        step()

    def submit(count: int) -> None:
        requests.extend(engine.request(LONG, 100, read=False, write=False) for _ in range(count))

    monkeypatch.setattr(engine.engine._core, "step", cancel_and_step)
    for count in (2, 1, 1):  # the second of two waits
        engine.engine.between_steps(partial(submit, count))
        assert requests[-1].ended.wait(30)
        assert requests[-1].outputs[-1].finish is FinishReason.CANCELLED
    assert not places
    idle(engine.engine)
    engine.engine.check_integrity()
    assert engine.engine.pool.free_overflow_pages == engine.engine.pool.overflow_pages
    assert on_disk(engine.engine.pool) <= METADATA
    engine.close()


def test_a_full_disk_is_one_clear_error_of_that_request(
    tmp_path: Path, answers: Windowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, full, real = small(tmp_path), [True], disk_overflow._fallocate

    def fallocate(handle: int, mode: int, at: int, size: int) -> None:
        if full[0] and not mode & disk_overflow._PUNCH_HOLE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle, mode, at, size)

    monkeypatch.setattr(disk_overflow, "_fallocate", fallocate)
    lines: list[Any] = []
    noted = SimpleNamespace(error=lambda event, **given: lines.append({"event": event, **given}))
    monkeypatch.setattr(request_lifecycle, "log", noted)
    other = engine.request(prompt(270, 50), 200)
    for filled_up in ("before", "meanwhile"):
        full[0] = filled_up == "before"
        failing = engine.request(LONG[:1000], 400)
        while not full[0] and not failing.outputs:
            failing.ended.wait(0.001)
        full[0] = True
        assert failing.ended.wait(30)
        assert not any(line.get("exc_info") for line in lines), "a sentence, and no traceback"
        assert lines[-1]["event"] == "request failed"
        error = failing.outputs[-1].error
        assert isinstance(error, OverflowFailed)
        assert "has no room for" in str(error)
        assert "No space left on device" in str(error)
        assert status_of(error)[1] == 507
    assert other.tokens() == right(answers, prompt(270, 50), 200)
    full[0] = False
    assert engine.answer(LONG)[0] == right(answers, LONG)
    engine.engine.check_integrity()
    engine.close()


def test_on_a_full_disk_who_comes_gets_the_room_of_those_who_are_done(
    tmp_path: Path, answers: Windowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of an earlier answer stay for its next turn, and their blocks with them; not where somebody needs them."""
    engine, real = small(tmp_path, beyond=2 * BEYOND), disk_overflow._fallocate
    engine.answer(LONG, 20, read=False)
    pool = engine.engine.pool
    assert pool.overflow is not None
    most = pool.overflow.backed_pages
    assert most >= len(LONG) // PAGE_TOKENS > 48, "it stays"

    def fallocate(handle: int, mode: int, at: int, size: int) -> None:
        assert pool.overflow is not None
        if not mode & disk_overflow._PUNCH_HOLE and pool.overflow.backed_pages > 48:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle, mode, at, size)

    monkeypatch.setattr(disk_overflow, "_fallocate", fallocate)
    ids = prompt(290, 900)
    assert engine.answer(ids, 20, read=False)[0] == right(answers, ids)
    engine.engine.check_integrity()
    engine.close()


def test_whoever_guesses_finds_room_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the model writes what it guesses before the pass that verifies it is planned: where all of a prompt
    but its last token was there, that is before anything was computed."""
    engine = small(tmp_path)
    pool, speculator = engine.engine.pool, engine.engine.speculator
    beyond, real, without, asked = pool.overflow, speculator.prepare, list[int](), list[int]()
    assert beyond is not None

    def prepare(decoding: Any, rows: int, longest: int) -> Any:
        for one in decoding:
            at, table = one.kv.num_computed, one.kv.table
            asked.append(at)
            end = min(at + 64, table.tokens)
            pages = {int(slot) // PAGE_TOKENS - beyond.first_page for slot in table.slots(at, end)}
            without.extend(page for page in pages if page // beyond._group not in beyond._users)
        return real(decoding, rows, longest)

    monkeypatch.setattr(speculator, "prepare", prepare)
    first, _ = engine.answer(LONG[:1000], 23)
    asked.clear()
    _, cached = engine.answer([*LONG[:1000], *first], 100)
    assert (cached, asked[0]) == (1022, 1022)
    assert not without
    engine.close()


def test_by_torchs_attention_too(tmp_path: Path, answers: Windowed) -> None:
    """Where our kernel cannot run, and the next turn's pages lie in several pieces."""
    engine = small(tmp_path)
    engine.engine.pool.attends_by_pages = False
    ids = prompt(280, 900)
    got, _ = engine.answer(ids, 20)
    more = ids + got + prompt(281, 40)
    second, cached = engine.answer(more, 20)
    assert cached == 919
    assert (len(got), len(second)) == (20, 20)
    engine.close()


def test_a_worker_tells_of_it(tmp_path: Path) -> None:
    ids = [16 + i % 4000 for i in range(0, 3 * 1500, 3)]
    with Api.from_pretrained("demo", cache=None) as large:
        want = large.generate(ids, max_tokens=10, temperature=0).text
        per_token = KVPool.bytes_per_token(*_shape(large))
    asked = {"pool_bytes": 400 * per_token, "overflow_bytes": "auto", "overflow_dir": tmp_path / "on disk"}
    with Api.from_pretrained("demo", cache=None, **asked) as engine:
        assert engine.generate(ids, max_tokens=10, temperature=0).text == want
        idle(engine._runtime.engine)
        engine._runtime.engine.check_integrity()
        stats = worker_stats(engine._runtime)
        assert (stats.overflow_pages, stats.overflow_free_pages, stats.overflowed) == (128, 128, 1)
        found = {s.name: s.value for metric in WorkerCollector(engine._runtime).collect() for s in metric.samples}
        assert found["kvsidecar_worker_overflow_pages"] == 128
        assert found["kvsidecar_worker_overflowed_total"] == 1
    with (
        Api.from_pretrained("demo", cache=None, pool_bytes=400 * per_token) as none,
        pytest.raises(PromptExceedsPool, match="pool has 12, so at most 384 tokens"),
    ):
        none.generate(ids)


# ---- with a daemon --------------------------------------------------------------------------------------------------


def test_it_is_stored_and_loaded_as_any_other(daemon: Node, tmp_path: Path, answers: Windowed) -> None:
    want = right(answers, LONG)
    first = small(tmp_path, daemon)
    assert first.answer(LONG) == (want, 0)
    assert first.stored == len(LONG) + 19
    first.close()
    second = small(tmp_path, daemon, prefix_cache_sequences=0)
    assert second.answer(LONG) == (want, len(LONG) - 1)
    # An answer that outgrows the pool is stored before it moves, and loaded again.
    ids = prompt(290, 220)
    assert second.answer(ids, 300)[0] == right(answers, ids, 300)
    assert second.engine.stats.overflow_admissions == 2
    assert on_disk(second.engine.pool) <= METADATA
    second.close()
