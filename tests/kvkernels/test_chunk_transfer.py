"""Chunks between shared memory and a device, over pinned memory that only a device writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kvkernels import dispatch, kv_pack_reference
from kvkernels.chunk_payload import ChunkPlacement
from kvkernels.cuda import cuda_library
from kvkernels.cuda.chunk_transfer import ChunkTransfer
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, ChunkHeader
from kvsidecar.chunk_layout import Geometry, layout_of, new_header
from torch import Tensor

from cache_daemon.memory.staging_memory import StagingMemory
from tests.kvkernels.doubles.queued_device import PinnedRange, QueuedDevice
from tests.kvkernels.emulated.conftest import Emulated, library

LAYERS, HEADS, DIM = 4, 2, 64
TRIMS = 8  # as many seconds of idleness as a staging of 64 MiB needs until it keeps its first 8 MiB only


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return library()


@pytest.fixture
def device(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueuedDevice]:
    """The pool's device: our kernels by the emulator, copies by io_uring, all of it late."""
    queued = QueuedDevice(emulated)
    transfer = ChunkTransfer(queued)
    monkeypatch.setattr(dispatch.cpu_chunks, "serves", lambda keys: False)
    monkeypatch.setattr(dispatch, "_cuda_kernels", lambda pool, half: queued)
    monkeypatch.setattr(dispatch, "_transfer", lambda device, use: transfer)
    yield queued
    queued.close()


def pool(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(LAYERS, HEADS, tokens, DIM, generator=generator) for _ in range(2))
    return keys.bfloat16(), values.bfloat16()


def header_of(tokens: int, bits: int = 16) -> ChunkHeader:
    return new_header(Geometry(LAYERS, HEADS, DIM, DATA_TYPE_BFLOAT16, bits), list(range(tokens)), 0)


def packed_by_definition(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader) -> bytearray:
    payload = bytearray(header.payload_bytes)
    kv_pack_reference.pack(keys, values, slots, header, layout_of(header).arrays(memoryview(payload)))
    return payload


def test_the_double_loses_what_a_device_writes_to_trimmed_staging() -> None:
    """The reason for all of this: page-locked staging gets zeros, and no checksum notices."""
    staging = StagingMemory(64 << 20)
    slot = staging.allocate(17 << 20)
    assert slot is not None
    view = np.frombuffer(staging.view(slot), np.uint8)
    pinned = PinnedRange(view.ctypes.data, len(view))
    staging.free(slot)
    for _ in range(TRIMS):
        staging.trim()
    pinned.write(view.ctypes.data, memoryview(bytes([7]) * len(view)))
    assert (view[: 8 << 20] == 7).all()
    assert not view[8 << 20 :].any()
    pinned.release()


def test_chunks_in_trimmed_staging_are_the_pools(device: QueuedDevice) -> None:
    header, staging = header_of(4096), StagingMemory(64 << 20)
    (keys, values), slots = pool(4096), torch.arange(4096)
    expected = packed_by_definition(keys, values, slots, header)
    for _ in range(2):
        first, slot = staging.allocate(9 << 20), staging.allocate(header.payload_bytes)
        assert first is not None
        assert slot is not None
        dispatch.pack_chunk(keys, values, slots, header, staging.view(slot))
        assert bytes(staging.view(slot)) == bytes(expected)
        staging.free(slot)
        staging.free(first)
        for _ in range(TRIMS):
            staging.trim()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_many_chunks_are_loaded_through_few_buffers(device: QueuedDevice, bits: int) -> None:
    """A buffer is filled again only after the device has used it, and each group of layers is complete when told."""
    header, pieces, sizes = header_of(40, bits), [], 7
    keys, values = pool(40 * sizes)
    for i in range(sizes):
        slots = torch.arange(40 * i, 40 * (i + 1))
        payload = memoryview(packed_by_definition(keys, values, slots, header)).toreadonly()
        pieces.append(ChunkPlacement(header, payload, slots))
    mine, theirs = ((torch.zeros_like(keys), torch.zeros_like(values)) for _ in range(2))
    groups = [range(1), range(1, 4)]
    for piece in pieces:
        kv_pack_reference.unpack(*theirs, piece.slots, header, layout_of(header).arrays(piece.payload), None, range(4))
    for group in dispatch.unpack_chunks(*mine, pieces, groups):
        for ours, right in zip(mine, theirs, strict=True):
            assert torch.equal(ours[group.start : group.stop], right[group.start : group.stop])
    inside = [any(first <= a < end for first, end in device.scratch_ranges) for a in device.payloads]
    assert inside == [True] * (sizes * len(groups)), "kernels get addresses of the device, never of the host"


def test_gaps_of_a_payload_keep_their_bytes(device: QueuedDevice) -> None:
    """Device memory holds earlier chunks, perhaps another tenant's; nothing of them leaves in a gap."""
    header = header_of(33, 4)
    payload = bytearray(b"\x11" * header.payload_bytes)
    dispatch.pack_chunk(*pool(33), torch.arange(33), header, memoryview(payload))
    covered = np.zeros(len(payload), bool)
    for section in layout_of(header).sections:
        covered[section.offset : section.offset + section.size_bytes] = True
    assert not covered.all()
    assert set(np.frombuffer(payload, np.uint8)[~covered]) == {0x11}


def test_a_launch_that_fails_leaves_no_copy_in_flight(device: QueuedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    header = header_of(40)
    payload = memoryview(bytearray(header.payload_bytes))

    def refuse(*_: object) -> None:
        raise cuda_library.KernelLaunchError("unpack16_bf16: refused")

    with monkeypatch.context() as broken:
        broken.setattr(device, "launch", refuse)
        with pytest.raises(cuda_library.KernelLaunchError, match="refused"):
            dispatch.unpack_chunk(*pool(40), torch.arange(40), header, payload)
    assert device.pending == 0


def test_no_memory_of_another_process_is_page_locked() -> None:
    """Contract of the client: the daemon replaces pages of staging, and a GPU would go on writing to the old ones."""
    root = Path(__file__).parents[2]
    sources = [
        p for part in ("clients/python", "kernels/kvkernels", "inference_svc") for p in (root / part).rglob("*.py")
    ]
    assert not [p for p in sources if "HostRegister" in p.read_text()]
