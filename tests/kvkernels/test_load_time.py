"""Time of a load on the virtual clock, and what the host waits for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvkernels.chunk_payload import ChunkPlacement
from kvkernels.cuda import chunk_transfer
from kvkernels.cuda.chunk_transfer import ChunkTransfer
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
from kvsidecar.chunk_layout import Geometry, new_header

from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_kernels import SimulatedKernels
from tests.kvkernels.device.simulated_tensor import add_simulated_device
from tests.kvkernels.device.virtual_clock import TO_DEVICE

LAYERS, HEADS, DIM, CHUNK, TOKENS = 32, 8, 128, 128, 8192
GROUPS = [range(i, i + 8) for i in range(0, LAYERS, 8)]


class Uncalled:
    """Kernels that only the clock runs."""

    def launch(self, *_: Any) -> None:
        raise AssertionError("the device executes nothing")

    def has(self, *_: Any) -> bool:
        return True


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """An H100 whose work only takes time."""
    made = SimulatedDevice(executes=False)
    add_simulated_device(made)
    yield made
    made.close()


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("bank_bytes", [128 << 20, 512 << 20])
def test_8k_tokens_take_the_time_of_their_bytes(
    device: SimulatedDevice, bits: int, bank_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-3.1-8B's shape: a GiB at 16 bits. Gathering into pinned memory takes the host no time on this clock."""
    monkeypatch.setattr(chunk_transfer._Part, "fill", lambda part, pinned: None)
    monkeypatch.setattr(chunk_transfer, "_BANK_BYTES", bank_bytes)
    header = new_header(Geometry(LAYERS, HEADS, DIM, DATA_TYPE_BFLOAT16, bits), list(range(CHUNK)), 0)
    shape = (LAYERS, HEADS, TOKENS, DIM)
    keys, values = (device.allocate(2 * math.prod(shape)).view(torch.bfloat16).view(shape) for _ in range(2))
    pieces = [ChunkPlacement(header, memoryview(b""), torch.arange(i, i + CHUNK)) for i in range(0, TOKENS, CHUNK)]
    clock, times = device.clock, [device.clock.host]
    kernels = SimulatedKernels(device, Uncalled())
    for _ in ChunkTransfer(device).unpack(kernels, keys, values, pieces, GROUPS):
        times.append(clock.host)
    first, seconds = times[1] - times[0], times[-1] - times[0]
    size = header.payload_bytes * len(pieces)
    of_bytes = size / clock.costs.link_bandwidth
    assert seconds <= 1.1 * of_bytes, f"{seconds * 1e3:.1f} ms, and its bytes take {of_bytes * 1e3:.1f} ms"
    assert first <= 0.6 * seconds, "the first layers compute while deeper ones arrive"
    # One wait for each group; in groups larger than a bank, one more for each bank that is filled again.
    banks = len(GROUPS) * (1 + size // len(GROUPS) // bank_bytes)
    assert clock.num_host_waits <= len(GROUPS) + (0 if banks == len(GROUPS) else banks + len(GROUPS))
    assert clock.num_enqueued[TO_DEVICE] == len(pieces) * len(GROUPS)
