"""A step on a device computes the first layers of a stored prefix while deeper ones arrive."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from kvkernels import ChunkPlacement, LoadedLayers, pack_chunk
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
from kvsidecar.chunk_layout import Geometry, new_header

from inference_svc.engine.engine import Engine
from inference_svc.kv_client.pool_writer import PoolWriter
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.models import loader
from inference_svc.models.loader import LoadedModel
from inference_svc.sequence.kv_connector import LoadResult, NullKVConnector
from inference_svc.sequence.sequence import Sequence
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request, idle
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_stream import Schedule
from tests.kvkernels.doubles import device_place

device = device_place.device  # fixture
TOKENS, GROUP = 70, 3


class StoredPrefix(NullKVConnector):
    """Loads one prefix from payloads in groups of layers, as the loader does."""

    def __init__(self, payload: memoryview, header: Any) -> None:
        self._payload, self._header = payload, header
        self.complete_at_the_end: list[bool] = []

    def load(self, sequence: Sequence, pool: KVPool, done: Any) -> bool:
        assert sequence.kv.table is not None
        slots = torch.from_numpy(sequence.kv.table.slots(0, TOKENS))
        layers = len(pool.keys)
        gate = LayerReadyEvent(layers)
        groups = [range(i, min(i + GROUP, layers)) for i in range(0, layers, GROUP)]

        def accept(loaded: LoadedLayers) -> bool:
            gate.open(loaded.layers.stop, loaded.ready)
            return True

        def copy() -> None:
            done(sequence, LoadResult(TOKENS, gate=gate))
            try:
                PoolWriter(pool, groups).write([[ChunkPlacement(self._header, self._payload, slots)]], accept)
                self.complete_at_the_end.append(gate.complete)
                gate.complete_load()
            finally:
                gate.fail()

        self.copying = threading.Thread(target=copy)
        self.copying.start()
        return True


@pytest.fixture
def loaded(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(loader, "pick_device", torch.device)
    return loader.load("demo", device=str(device.torch), dtype="bfloat16")


def engine_with(loaded: LoadedModel, cache: NullKVConnector) -> Engine:
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 512, loaded.dtype, loaded.device)
    return Engine(loaded, pool, cache)


def stored(loaded: LoadedModel, ids: list[int]) -> tuple[list[int], StoredPrefix]:
    """Return the answer of a cold run, and its first tokens as a chunk."""
    engine = engine_with(loaded, NullKVConnector())
    request = Request(ids, 3)
    engine.submit(request.sequence)
    tokens = request.tokens()
    idle(engine)
    geometry = Geometry(loaded.layers, loaded.kv_heads, loaded.head_dim, DATA_TYPE_BFLOAT16, 16)
    header = new_header(geometry, ids[:TOKENS], 0)
    payload = memoryview(bytearray(header.payload_bytes))
    slots = torch.from_numpy(engine.resident(0).table.slots(0, TOKENS))
    pack_chunk(engine.pool.keys, engine.pool.values, slots, header, payload)
    engine.stop()
    return tokens, StoredPrefix(payload, header)


@pytest.mark.parametrize("device", [Schedule.LATE], indirect=True)
def test_a_hit_is_answered_as_a_miss(device: SimulatedDevice, loaded: LoadedModel) -> None:
    ids = prompt(1, TOKENS + 10)
    want, cache = stored(loaded, ids)
    engine = engine_with(loaded, cache)
    request = Request(ids, 3)
    engine.submit(request.sequence)
    assert request.tokens() == want
    assert request.sequence.usage.num_cached == TOKENS
    cache.copying.join(60)
    assert cache.complete_at_the_end == [False], "a load is complete when its thread has waited for the device"
    idle(engine)
    engine.check_integrity()
    engine.stop()
