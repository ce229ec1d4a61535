"""Sharing of a running prefix with a waiting prompt."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import replace

import pytest
import torch

from inference_svc.kv_pool import prefix_cache
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import MIN_SHARED_TOKENS, PrefixCache, TokenArray
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.scheduling.admission import Admission
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.sequence.generation_request import CacheParams
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import Sequence, SequenceState
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request

LAYERS, IDS = 2, prompt(1, 200)


def sequence_of(salt: bytes) -> Sequence:
    sequence = Request(IDS, 5).sequence
    sequence.request = replace(sequence.request, cache=CacheParams(tenant_salt=salt))
    return sequence


def prefix_beside(salt: bytes, layers: LayerReadyEvent | None = None) -> int | None:
    """Length of the prefix that a prompt of tenant ``a`` shares; None if it is held back.

    A running sequence of tenant ``salt`` has the same prompt, and all but its last token in the pool.
    """
    pool = KVPool(LAYERS, 1, 2, 1024, torch.float32, torch.device("cpu"))
    admission = Admission(pool, PrefixCache(pool, 8), 64, 1024, PrefillBudget(0.0), NullKVConnector())
    running, waiting = sequence_of(salt), sequence_of(b"a")
    table = pool.allocate(len(IDS))
    assert table is not None
    running.kv.load(len(IDS) - 1, table, None)
    running.kv.layers, running.state = layers, SequenceState.RUNNING
    chosen = admission.next(deque([waiting]), [running])
    return None if chosen is None else chosen[1].tokens


@pytest.mark.parametrize(("salt", "shared"), [(b"a", len(IDS) - 1), (b"b", 0)])
def test_only_the_own_tenants_running_prefix_is_shared(salt: bytes, shared: int) -> None:
    assert prefix_beside(salt) == shared


@pytest.mark.parametrize(("loaded", "shared"), [(1, None), (LAYERS, len(IDS) - 1)])
def test_a_running_prefix_is_shared_once_all_its_layers_are_loaded(loaded: int, shared: int | None) -> None:
    layers = LayerReadyEvent(LAYERS)
    layers.open(loaded)
    assert prefix_beside(b"a", layers) == shared


def test_requests_that_wait_for_one_prefix_do_not_delay_others() -> None:
    """Their number does not matter, and each is still held back."""
    pool = KVPool(LAYERS, 1, 2, 1024, torch.float32, torch.device("cpu"))
    admission = Admission(pool, PrefixCache(pool, 8), 64, 1024, PrefillBudget(0.0), NullKVConnector())
    running, other = sequence_of(b"a"), Request(prompt(2, 40), 5).sequence
    table = pool.allocate(len(IDS))
    assert table is not None
    running.kv.load(0, table, None)
    running.state = SequenceState.RUNNING
    following = [sequence_of(b"a") for _ in range(40)]
    chosen = admission.next(deque([*following, other]), [running])
    assert chosen is not None
    assert chosen[0] is other
    assert admission.next(deque(following), [running]) is None
    assert admission.wake_at == pytest.approx(following[0].request.arrived_at + 60)
    elsewhere = sequence_of(b"b")
    chosen = admission.next(deque([*following, elsewhere]), [running])
    assert chosen is not None
    assert chosen[0] is elsewhere, "another tenant waits for nothing"


@pytest.mark.parametrize("computed", [0, len(IDS) - 1], ids=["held back", "sharing"])
def test_two_prompts_are_compared_once(computed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While blocks are missing, each step examines the same prompts again."""
    real, compared = prefix_cache.common_prefix, list[int]()

    def noted(a: TokenArray, b: TokenArray) -> int:
        if min(len(a), len(b)) > MIN_SHARED_TOKENS:
            compared.append(len(a))
        return real(a, b)

    monkeypatch.setattr(prefix_cache, "common_prefix", noted)
    pool = KVPool(LAYERS, 1, 2, 1024, torch.float32, torch.device("cpu"))
    admission = Admission(pool, PrefixCache(pool, 8), 64, 1024, PrefillBudget(0.0), NullKVConnector())
    running, waiting = sequence_of(b"a"), deque(sequence_of(b"a") for _ in range(4))
    running.kv.load(computed, pool.allocate(len(IDS)), None)
    running.state = SequenceState.RUNNING
    for _ in range(3):
        assert (admission.next(waiting, [running]) is None) == (not computed)
    assert len(compared) == len(waiting)
    del waiting, running
    gc.collect()
    assert not admission._prompts


def test_a_preempted_sequence_is_compared_with_its_answer() -> None:
    pool = KVPool(LAYERS, 1, 2, 1024, torch.float32, torch.device("cpu"))
    admission = Admission(pool, PrefixCache(pool, 8), 64, 1024, PrefillBudget(0.0), NullKVConnector())
    waiting, running = Request(IDS, 50).sequence, Request([*IDS, *prompt(2, 40)], 5).sequence
    running.kv.load(len(running.tokens) - 1, pool.allocate(len(running.tokens)), None)
    running.state = SequenceState.RUNNING
    for length in (len(IDS), len(IDS) + 20):
        waiting.tokens[:] = running.tokens[:length]
        chosen = admission.next(deque([waiting]), [running])
        assert chosen is not None
        assert chosen[1].tokens == length - 1
        waiting.queue.preempted = True
