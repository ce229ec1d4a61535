"""Chunks are written to the pool in order of layers; when that ends, no device writes any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvkernels.chunk_payload import ChunkPlacement, LoadedLayers
from kvsidecar.errors import KVSidecarError

from inference_svc.kv_client.pool_writer import PoolWriter
from inference_svc.kv_pool.kv_pool import KVPool
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_stream import Schedule
from tests.kvkernels.doubles import device_place
from tests.kvkernels.test_chunk_transfer import DIM, HEADS, LAYERS, header_of, packed_by_definition, pool

device = device_place.device  # fixture
GROUPS = [range(2), range(2, LAYERS)]
late = pytest.mark.parametrize("device", [Schedule.LATE], indirect=True)


def made(device: SimulatedDevice) -> tuple[PoolWriter, list[ChunkPlacement]]:
    header, stored = header_of(40), pool(80)
    blocks = KVPool(LAYERS, HEADS, DIM, 256, torch.bfloat16, device.torch)
    pieces = [
        ChunkPlacement(header, memoryview(packed_by_definition(*stored, slots, header)), slots)
        for slots in torch.arange(80).split(40)
    ]
    device.synchronize()
    return PoolWriter(blocks, GROUPS), pieces


@late
def test_arriving_chunks_are_written_group_by_group(device: SimulatedDevice) -> None:
    writer, pieces = made(device)
    accepted: list[range] = []
    pending: list[int] = []

    def accept(loaded: LoadedLayers) -> bool:
        accepted.append(loaded.layers)
        pending.append(device.num_pending)
        return True

    assert writer.write([[piece] for piece in pieces], accept)
    assert accepted == GROUPS * 2
    assert all(pending), "a group is accepted as soon as it is enqueued"
    assert device.num_pending == 0
    for got, expected in zip((writer.pool.keys, writer.pool.values), pool(80), strict=True):
        assert torch.equal(got[:, :, :80].cpu(), expected)


@late
def test_a_chunk_that_does_not_arrive_leaves_no_work_of_the_others(device: SimulatedDevice) -> None:
    writer, pieces = made(device)

    def arriving() -> Iterator[list[ChunkPlacement]]:
        yield pieces[:1]
        raise KVSidecarError("the daemon has gone")

    with pytest.raises(KVSidecarError, match="gone"):
        writer.write(arriving(), lambda loaded: True)
    assert device.num_pending == 0


@late
@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_a_load_that_nobody_wants_ends_when_the_device_has_ended(device: SimulatedDevice, last: int) -> None:
    writer, pieces = made(device)
    accepted: list[range] = []

    def accept(loaded: LoadedLayers) -> bool:
        accepted.append(loaded.layers)
        return len(accepted) < last

    assert not writer.write([[piece] for piece in pieces], accept)
    assert len(accepted) == last
    assert device.num_pending == 0


@late
def test_a_session_that_ends_leaves_no_work(device: SimulatedDevice) -> None:
    writer, pieces = made(device)

    def accept(loaded: LoadedLayers) -> bool:
        raise ConnectionError("the session ended")

    with pytest.raises(ConnectionError):
        writer.write([pieces], accept)
    assert device.num_pending == 0
