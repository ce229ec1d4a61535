"""Sliding windows: pages that no layer sees any more are neither kept nor loaded, and no answer changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.node import Node
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import WINDOW_STEP, KVPool
from inference_svc.kv_pool.prefix_cache import CachedSequence, CacheScope, PrefixCache, StoredPrefix
from inference_svc.scheduling import window_release
from inference_svc.scheduling.admission import Admission
from inference_svc.scheduling.copy_on_write import PrefixSource
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.sequence.generation_request import CacheParams
from inference_svc.sequence.kv_connector import NullKVConnector
from tests.inference_svc.server.test_load import Request, idle
from tests.inference_svc.windowed import (
    ALL,
    CHUNK,
    CONTEXT,
    PIECE,
    SOME,
    WINDOW,
    SlowCache,
    Windowed,
    prompt,
    windowed,
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="64MiB") as node:
        yield node


@pytest.fixture(scope="module")
def answers() -> Iterator[Windowed]:
    """What is right: all pages are kept."""
    keeping = windowed(keep_all=True)
    yield keeping
    keeping.close()


def test_the_models_windows_are_those_that_attention_gets() -> None:
    assert windowed(ALL).engine.pool.windows == (WINDOW,) * 4
    some = windowed(SOME).engine.pool
    assert some.windows == (WINDOW, None, WINDOW, None)
    assert (some.window, some.max_window, some.wide_layers) == (0, WINDOW, (1, 3))
    assert windowed("LlamaForCausalLM").engine.pool.max_window == 0


def test_a_long_prompt_keeps_the_pages_of_its_window(answers: Windowed) -> None:
    ids = prompt(1, 1500)
    want, _ = answers.answer(ids, 200, read=False, write=False)
    engine = windowed()
    assert engine.answer(ids, 200)[0] == want
    assert max(engine.pages) <= (WINDOW + PIECE + 64) // PAGE_TOKENS + 2
    assert max(answers.pages) >= 1500 // PAGE_TOKENS
    # What stays for the next turn is the window, and as much more as an answer's end may be told differently.
    resident = engine.engine.resident(0)
    assert len(resident.tokens) == 1699
    assert len(engine.engine.pool.layers) == 4
    held = engine.engine.pool.pages - engine.engine.pool.free_pages
    assert WINDOW // PAGE_TOKENS <= held <= (WINDOW + 2 * 64) // PAGE_TOKENS + 2
    engine.close()


def test_a_prompt_longer_than_the_pool_is_answered_all_the_same(answers: Windowed) -> None:
    ids = prompt(2, 2000)
    want, _ = answers.answer(ids, read=False, write=False)
    engine = windowed(tokens=512)
    assert engine.engine.context_length == CONTEXT
    assert engine.answer(ids)[0] == want
    assert windowed(tokens=WINDOW + PIECE).engine.context_length == WINDOW + PIECE
    engine.close()


def test_the_next_turn_goes_on_and_an_earlier_one_begins_anew(answers: Windowed) -> None:
    engine = windowed()
    ids = prompt(3, 700)
    for turn in range(3):
        want, _ = answers.answer(ids, read=False, write=False)
        got, cached = engine.answer(ids)
        assert (got, cached) == (want, 0 if turn == 0 else len(ids) - 1 - 25)
        ids = ids + got + prompt(4 + turn, 25)
    early = ids[:300] + prompt(9, 30)  # what comes before it is gone
    assert engine.answer(early) == (answers.answer(early, read=False, write=False)[0], 0)
    assert engine.engine.resident_sequences == 2
    engine.close()


def test_the_next_turn_goes_on_where_the_pool_has_no_room_beside_the_last(answers: Windowed) -> None:
    """It fits by itself, and that must be enough."""
    engine = windowed(tokens=WINDOW + PIECE + WINDOW_STEP + PAGE_TOKENS)
    assert engine.engine.context_length == CONTEXT
    ids = prompt(15, 600)
    for turn in range(2):
        want, _ = answers.answer(ids, read=False, write=False)
        assert engine.answer(ids)[0] == want
        ids = ids + want + prompt(16 + turn, 400)
    engine.close()


def test_several_answers_to_a_prompt_read_it_once(answers: Windowed) -> None:
    """Also where the window's edge is where pages are let go of."""
    engine, ids = windowed(), prompt(17, 8 * WINDOW_STEP + WINDOW - 1)
    want, _ = answers.answer(ids, read=False, write=False)
    requests = [engine.request(ids) for _ in range(2)]
    assert [r.tokens() for r in requests] == [want] * 2
    assert requests[1].sequence.usage.num_cached == len(ids) - 1
    engine.close()


def test_a_source_that_goes_to_make_room_is_not_gone_on_from() -> None:
    """Its begun page is gone with it, and the whole ones before it do not reach as far back as is seen."""
    pool = KVPool(1, 1, 8, 20 * PAGE_TOKENS, torch.float32, torch.device("cpu"), [WINDOW])
    residents = PrefixCache(pool, 4)
    table = pool.allocate(10 * PAGE_TOKENS)
    assert table is not None
    ids, begun = prompt(19, 319), 2 * WINDOW_STEP + WINDOW - 1
    pool.release_prefix(table, 2 * WINDOW_STEP)
    residents.insert(CachedSequence(np.asarray(ids, np.uint32), table, CacheScope(), StoredPrefix()))
    assert pool.covers_window(table, begun)
    others = pool.allocate(12 * PAGE_TOKENS)
    request = Request(ids[:begun] + prompt(20, 40), 1)
    request.sequence.request = replace(request.sequence.request, cache=CacheParams(write=False))
    source = PrefixSource(begun, cached=residents.entries[0])
    admission = Admission(pool, residents, WINDOW_STEP, 640, PrefillBudget(0.0), NullKVConnector())
    if admission.allocate(request.sequence, source, pool.pages, 0):
        assert request.sequence.kv.table is not None
        assert pool.covers_window(request.sequence.kv.table, request.sequence.kv.num_computed)
    assert others is not None


def test_windows_under_pressure_change_no_answer(daemon: Node, answers: Windowed) -> None:
    prompts = [prompt(20 + i, 60 if i else 700) for i in range(6)]
    want = [answers.answer(ids, 120, read=False, write=False)[0] for ids in prompts]
    for node in (None, daemon):
        engine = windowed(tokens=448, node=node)
        requests = engine.request_together(prompts, 120)
        assert [r.tokens() for r in requests] == want
        idle(engine.engine)
        engine.engine.check_integrity()
        assert engine.engine.stats.preemptions > 0
        engine.close()


def test_while_parts_are_stored_nobody_is_preempted(answers: Windowed) -> None:
    prompts = [prompt(27, 900), prompt(28, 880)]
    want = [answers.answer(ids, read=False, write=False)[0] for ids in prompts]
    slow = SlowCache()
    engine = windowed(tokens=704, slow=slow)
    requests = [engine.request(ids) for ids in prompts]
    slow.wait()
    while engine.engine._core.busy:  # until all that is free is taken
        requests[0].ended.wait(0.001)
    assert engine.engine._core.window_releaser.pending_pages > 0
    engine.engine.check_integrity()
    slow.go_on()
    assert [r.tokens() for r in requests] == want
    assert engine.engine.stats.preemptions == 0
    assert all(r.sequence.kv.stored.tokens >= 640 for r in requests), "what was waiting to be stored went unstored"
    idle(engine.engine)
    engine.engine.check_integrity()
    engine.close()


def test_what_is_let_go_of_is_finite(answers: Windowed) -> None:
    """Whoever gets the pages may read them, where torch attends over what lies behind a sequence's end."""
    engine, bad, good = windowed(tokens=1024), prompt(29, 900), prompt(26, 300)
    engine.engine.pool.attends_by_pages = False
    bad[100] = 0 if 0 not in good else next(i for i in range(500) if i not in good)
    engine.engine.decoder._embed.weight[bad[100]] = float("nan")
    failing = engine.request(bad, 1)
    assert failing.ended.wait(30)
    assert failing.outputs[-1].error is not None
    assert engine.engine.pool.values.isfinite().all()
    assert engine.engine.pool.keys.isfinite().all()
    engine.close()


def test_by_torchs_attention_too() -> None:
    """Where our kernel cannot run, what is gone is read from the padding and hidden."""
    found = []
    for keep_all in (True, False):
        engine = windowed("Phi3ForCausalLM", keep_all=keep_all)
        engine.engine.pool.attends_by_pages = False
        ids = prompt(30, 900)
        first, _ = engine.answer(ids, 150)
        second, cached = engine.answer(ids + first + prompt(31, 40), 150)
        assert cached == 900 + 149
        found.append((first, second))
        engine.close()
    assert found[0] == found[1]


# ---- with a daemon --------------------------------------------------------------------------------------------------


def bytes_for(engine: Windowed, tokens: int) -> int:
    pool = engine.engine.pool
    return 2 * tokens * pool.keys.shape[0] * pool.keys.shape[1] * pool.keys.shape[3] * pool.keys.element_size()


def loaded_bytes(engine: Windowed) -> int:
    assert engine.cache is not None
    return engine.cache.stats.loaded_bytes


def test_a_hit_loads_what_the_window_needs_and_whole_chunks_stay(daemon: Node, answers: Windowed) -> None:
    ids = prompt(40, 1500)
    want, _ = answers.answer(ids, 100, read=False, write=False)
    first = windowed(node=daemon)
    assert first.answer(ids, 100) == (want, 0)
    assert first.stored == 1599
    first.close()
    daemon.settle()
    daemon.restart_daemon()
    second = windowed(node=daemon)
    assert second.answer(ids, 100) == (want, 1499)
    assert 0 < loaded_bytes(second) <= bytes_for(second, WINDOW + 64 + CHUNK)
    more = ids + want + prompt(41, 300)
    wanted_more, _ = answers.answer(more, read=False, write=False)
    assert second.answer(more) == (wanted_more, 1599)
    assert second.stored == len(more) + 19  # what is stored goes on where it ended
    second.close()
    whole = windowed(node=daemon, keep_all=True)
    assert whole.answer(more) == (wanted_more, len(more) - 1)
    assert loaded_bytes(whole) >= bytes_for(whole, len(more) - CHUNK)
    whole.close()


def test_a_hit_longer_than_the_pool(daemon: Node, answers: Windowed) -> None:
    ids = prompt(50, 2000)
    want, _ = answers.answer(ids, read=False, write=False)
    first = windowed(tokens=1024, node=daemon)
    assert first.answer(ids) == (want, 0)
    assert first.stored == 2019
    first.close()
    second = windowed(tokens=1024, node=daemon)
    assert second.answer(ids) == (want, 1999)
    second.close()
    # A resident has the beginning, and the daemon has more than the pages behind that would reach to.
    third = windowed(tokens=1024, node=daemon)
    assert third.answer(ids[:1000], 1)[1] == 999
    assert third.answer(ids) == (want, 1999)
    third.close()


def test_where_texts_part_the_window_before_is_loaded(daemon: Node, answers: Windowed) -> None:
    ids = prompt(60, 1000)
    first = windowed(node=daemon)
    first.answer(ids)
    for at in (70, 500, 930):
        branch = ids[:at] + prompt(61, 60)
        want, _ = answers.answer(branch, read=False, write=False)
        assert first.answer(branch) == (want, at)
    first.close()


def test_layers_without_a_window_get_what_is_far(daemon: Node) -> None:
    keeping = windowed(SOME, keep_all=True)
    ids = prompt(70, 1200)
    want, _ = keeping.answer(ids, 50, read=False, write=False)
    first = windowed(SOME, node=daemon)
    assert first.answer(ids, 50) == (want, 0)
    first.close()
    second = windowed(SOME, node=daemon)
    assert second.answer(ids, 50) == (want, 1199)
    half = bytes_for(second, 1200) // 2
    assert half <= loaded_bytes(second) <= half + bytes_for(second, WINDOW + 64 + CHUNK)
    # Of the far tokens layers with a window have nothing: who parts there gets them from the daemon.
    branch = ids[:400] + prompt(71, 50)
    assert second.answer(branch) == (keeping.answer(branch, read=False, write=False)[0], 400)
    more = ids + want + prompt(72, 50)
    assert second.answer(more) == (keeping.answer(more, read=False, write=False)[0], 1249)
    assert second.stored == len(more) + 19
    second.close()
    keeping.close()


def test_cancelled_while_parts_are_stored_leaves_nothing() -> None:
    slow = SlowCache()
    engine = windowed(tokens=2048, slow=slow)
    request = engine.request(prompt(80, 1200), 400)
    slow.wait()
    engine.engine.cancel(request.sequence)
    assert request.ended.wait(30)
    assert engine.engine._core.window_releaser.busy
    assert engine.engine.load[2] == 1, "what is still being stored is told"
    engine.engine.check_integrity()
    slow.go_on()
    idle(engine.engine)
    assert not engine.engine._core.window_releaser.busy
    engine.engine.check_integrity()
    assert engine.engine.free_pages == engine.engine.pool.pages
    engine.close()


def test_a_pool_that_the_prompts_own_pages_nearly_fill_stores_all_of_it(daemon: Node) -> None:
    """Room for the next piece is there already: nothing has to go for it unstored."""
    engine, ids = windowed(tokens=WINDOW + PIECE + 4 * WINDOW_STEP, node=daemon), prompt(81, 1500)
    engine.answer(ids)
    assert engine.stored == len(ids) + 19
    engine.close()


def test_pieces_larger_than_what_waits_to_be_stored_are_stored(daemon: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_release, "_MAX_UNSAVED_TOKENS", 256)
    engine, ids = windowed(node=daemon, max_num_batched_tokens=1024), prompt(82, 1500)
    engine.answer(ids)
    assert engine.stored == len(ids) + 19
    engine.close()


def test_what_is_not_finite_is_not_stored(daemon: Node, answers: Windowed) -> None:
    """Of a prompt of which a part is stored before anybody has seen a logit."""
    engine, ids = windowed(node=daemon), prompt(90, 900)
    engine.engine.decoder._embed.weight[ids[0]] = float("nan")
    request = engine.request(ids, 1)
    assert request.ended.wait(30)
    idle(engine.engine)
    engine.engine.check_integrity()
    engine.close()
    second = windowed(node=daemon)
    assert second.answer(ids) == (answers.answer(ids, read=False, write=False)[0], 0)
    second.close()
