"""Layer-wise restore: the forward waits for layers that are still being loaded, and survives those that never come."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from inference_svc.engine.engine import Engine
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.layerwise_load import LayerLoadFailed, LayerReadyEvent
from inference_svc.models.loader import load
from inference_svc.sequence.kv_connector import LoadResult, NullKVConnector
from inference_svc.sequence.sequence import Sequence
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request, idle


class SlowCache(NullKVConnector):
    """Connector that loads the keys and values of one prefix slowly, layer by layer. It fails at layer ``fail_at``."""

    def __init__(self, tokens: int, keys: torch.Tensor, values: torch.Tensor, fail_at: int | None = None) -> None:
        self._tokens, self._keys, self._values, self._fail_at = tokens, keys, values, fail_at
        self.opened: list[float] = []
        self.began = threading.Event()

    def load(self, sequence: Sequence, pool: KVPool, done: Any) -> bool:
        assert sequence.kv.table is not None
        slots = torch.from_numpy(sequence.kv.table.slots(0, self._tokens))
        gate = LayerReadyEvent(len(self._keys))

        def copy() -> None:
            done(sequence, LoadResult(self._tokens, gate))
            self.began.set()
            for layer in range(len(self._keys)):
                time.sleep(0.02)
                if layer == self._fail_at:
                    gate.fail()
                    return
                pool.keys[layer].index_copy_(1, slots, self._keys[layer])
                pool.values[layer].index_copy_(1, slots, self._values[layer])
                self.opened.append(time.perf_counter())
                gate.open(layer + 1)

        threading.Thread(target=copy).start()
        return True


def engine_with(cache: Any) -> Engine:
    loaded = load("demo", dtype="float32")
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 2048, loaded.dtype, loaded.device)
    return Engine(loaded, pool, cache)


@pytest.mark.parametrize("fail_at", [None, 0, 7])
def test_answers_are_those_without_a_cache(fail_at: int | None) -> None:
    ids = prompt(1, 300)
    plain = engine_with(NullKVConnector())
    request = Request(ids, 10)
    plain.submit(request.sequence)
    want = request.tokens()
    idle(plain)
    resident = plain.resident(0)
    slots = torch.from_numpy(resident.table.slots(0, 280))
    keys, values = (t.index_select(2, slots).clone() for t in (plain.pool.keys, plain.pool.values))
    plain.stop()

    cache = SlowCache(280, keys, values, fail_at)
    engine = engine_with(cache)
    slow, beside = Request(ids, 10), Request(prompt(2, 40), 30)
    beside.sequence.request = replace(beside.sequence.request, cache=type(beside.sequence.request.cache)(read=False))
    engine.submit(beside.sequence)
    engine.submit(slow.sequence)
    assert slow.tokens() == want
    assert slow.sequence.usage.num_cached == (280 if fail_at is None else 0)
    assert len(beside.tokens()) == 30
    if fail_at is None:
        assert slow.sequence.timestamps.first_token_at > cache.opened[-1]
    idle(engine)
    engine.check_integrity()
    engine.stop()


def test_cancelling_waits_until_nobody_writes_to_the_pages() -> None:
    shape = (12, 2, 280, 32)
    cache = SlowCache(280, torch.zeros(shape), torch.zeros(shape))
    engine = engine_with(cache)
    request = Request(prompt(1, 300), 10)
    engine.submit(request.sequence)
    assert cache.began.wait(60)
    engine.cancel(request.sequence)
    assert request.ended.wait(20)
    idle(engine)
    assert len(cache.opened) == 12
    engine.check_integrity()
    assert engine.free_pages == engine.pool.pages
    engine.stop()


def test_a_gate_that_failed_lets_nobody_pass() -> None:
    gate = LayerReadyEvent(4)
    gate.open(2)
    gate.fail()
    gate.pass_layer(1)
    assert gate.done
    assert not gate.complete
    with pytest.raises(LayerLoadFailed, match="layer 2"):
        gate.pass_layer(2)
    whole = LayerReadyEvent(4)
    whole.open(4)
    whole.fail()
    assert not whole.failed
    whole.pass_layer(3)


def test_a_step_waits_for_the_layer_after_the_last_loaded_one() -> None:
    gate = LayerReadyEvent(4)
    gate.open(1)
    opened = threading.Timer(0.2, gate.open, (2,))
    opened.start()
    gate.pass_layer(1)  # a step that does not wait fails, and the engine computes it again and again
    assert gate._ready == 2
    opened.join()
