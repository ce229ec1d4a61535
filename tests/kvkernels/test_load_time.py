"""Time of a load on the virtual clock, its launches, and what the host and the engine wait for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvkernels.chunk_payload import ChunkPlacement, LoadedLayers
from kvkernels.cuda import chunk_transfer
from kvkernels.cuda.chunk_transfer import ChunkTransfer
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
from kvsidecar.chunk_layout import Geometry, new_header
from torch import Tensor

from inference_svc.model_runner.forward_batch import ForwardBatch
from inference_svc.model_runner.layerwise_load import LayerReadyEvent, group_layers
from tests.kvkernels.device.simulated_device import SimulatedDevice, use_of
from tests.kvkernels.device.simulated_kernels import SimulatedKernels
from tests.kvkernels.device.simulated_stream import SimulatedEvent
from tests.kvkernels.device.simulated_tensor import add_simulated_device
from tests.kvkernels.device.virtual_clock import COMPUTE, TO_DEVICE

LAYERS, HEADS, DIM, CHUNK = 32, 8, 128, 128


class Uncalled:
    """Kernels that do nothing; the virtual clock only counts their time."""

    def launch(self, *_: Any) -> None:
        raise AssertionError("the device executes nothing")

    def has(self, *_: Any) -> bool:
        return True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """An H100 whose work only takes time. Gathering into pinned memory takes the host no time on this clock."""
    monkeypatch.setattr(chunk_transfer._Part, "fill", lambda part, pinned: None)
    made = SimulatedDevice(executes=False)
    add_simulated_device(made)
    yield made
    made.close()


class Load:
    """Load of chunks of Llama-3.1-8B's shape, as the loader divides it into groups of layers."""

    def __init__(self, device: SimulatedDevice, tokens: int, bits: int) -> None:
        header = new_header(Geometry(LAYERS, HEADS, DIM, DATA_TYPE_BFLOAT16, bits), list(range(CHUNK)), 0)
        shape = (LAYERS, HEADS, tokens, DIM)
        self.keys, self.values = (
            device.allocate(2 * math.prod(shape)).view(torch.bfloat16).view(shape) for _ in range(2)
        )
        slots = torch.arange(tokens)
        self.pieces = [ChunkPlacement(header, memoryview(b""), slots[i : i + CHUNK]) for i in range(0, tokens, CHUNK)]
        self.size_bytes = header.payload_bytes * len(self.pieces)
        self.groups = group_layers(LAYERS, self.size_bytes // LAYERS)
        self._kernels, self._transfer = SimulatedKernels(device, Uncalled()), ChunkTransfer(device)

    def __iter__(self) -> Iterator[LoadedLayers]:
        return self._transfer.unpack(self._kernels, self.keys, self.values, self.pieces, self.groups)


def done_at(loaded: LoadedLayers) -> float:
    assert isinstance(loaded.ready, SimulatedEvent)
    return loaded.ready.checked().time


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("tokens", [512, 8192, 32_768])
def test_a_load_takes_the_time_of_its_bytes(device: SimulatedDevice, tokens: int, bits: int) -> None:
    load, clock = Load(device, tokens, bits), device.clock
    began, enqueued = clock.host, list(load)
    enqueued[-1].wait()
    first, seconds = done_at(enqueued[0]) - began, clock.host - began
    of_bytes = load.size_bytes / clock.costs.link_bandwidth
    assert seconds <= 1.1 * of_bytes + 50e-6, f"{seconds * 1e3:.2f} ms; its bytes take {of_bytes * 1e3:.2f} ms"
    assert first <= 1.5 / len(load.groups) * seconds, "the first layers compute while deeper ones arrive"
    assert device.launched == [f"unpack{bits}_bf16"] * len(load.groups)
    assert 1 <= clock.num_host_waits <= len(load.groups), "the last one is the loader's, at the end of the load"


def test_8k_tokens_are_copied_in_few_pieces(device: SimulatedDevice) -> None:
    load = Load(device, 8192, 16)
    list(load)[-1].wait()
    assert len(load.groups) == 8
    assert device.clock.num_enqueued[TO_DEVICE] <= 33 * len(load.groups), "of 4 MiB, and the table"


def test_a_larger_load_has_smaller_groups() -> None:
    assert group_layers(32, 1 << 20) == [range(i, i + 8) for i in range(0, 32, 8)]
    assert group_layers(32, 32 << 20) == [range(i, i + 4) for i in range(0, 32, 4)]
    assert group_layers(3, 1 << 30) == [range(1), range(1, 2), range(2, 3)]
    assert group_layers(12, 17 << 20) == [range(7), range(7, 12)]
    assert group_layers(1, 0) == [range(1)]


def layer_computed(device: SimulatedDevice, pool: Tensor, layer: int, seconds: float) -> None:
    """Enqueue a layer's computation, which reads the pool, on the engine's stream."""
    uses = [use_of(pool[layer], writes=False)]
    device.enqueue(device.current_stream(), f"layer {layer}", uses, COMPUTE, seconds, lambda _: None)


def test_the_first_layers_compute_while_deeper_ones_arrive(device: SimulatedDevice) -> None:
    """A step that takes as long as the load: it ends one group of layers after the load."""
    load, clock, gate = Load(device, 8192, 16), device.clock, LayerReadyEvent(LAYERS)
    batch: Any = SimpleNamespace(gates=(gate,), pool=SimpleNamespace(keys=load.keys))
    of_layer, began = load.size_bytes / LAYERS / clock.costs.link_bandwidth, clock.host
    for loaded in load:
        gate.open(loaded.layers.stop, loaded.ready)
        for layer in loaded.layers:
            ForwardBatch.pass_layer(batch, layer)
            layer_computed(device, load.keys, layer, of_layer)
    assert not gate.complete
    loaded.wait()
    gate.complete_load()
    assert gate.complete
    assert clock.num_host_waits <= len(load.groups)
    device.synchronize()
    assert clock.host - began <= 1.1 * (LAYERS + len(load.groups[-1])) * of_layer
