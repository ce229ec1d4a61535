"""Chunks between shared memory and a device, over pinned memory that only a device writes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvkernels import dispatch, kv_pack_reference
from kvkernels.chunk_payload import ChunkPlacement, LoadedLayers
from kvkernels.cuda import chunk_transfer, cuda_library
from kvkernels.device.visible_devices import device_of
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, ChunkHeader
from kvsidecar.chunk_layout import Geometry, layout_of, new_header
from torch import Tensor

from cache_daemon.memory.staging_memory import StagingMemory
from inference_svc.kv_client.daemon_connector import DaemonConnector
from inference_svc.kv_pool.kv_pool import KVPool
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_kernels import SimulatedKernels
from tests.kvkernels.doubles import device_place
from tests.kvkernels.doubles.pinned_range import PinnedRange

LAYERS, HEADS, DIM = 4, 2, 64
device, place = device_place.device, device_place.place  # fixtures
TRIMS = 8  # as many seconds of idleness as a staging of 64 MiB needs until it keeps its first 8 MiB only


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


def on_stream(place: torch.device, call: Callable[..., object], *arguments: object) -> None:
    """Call from a thread whose current stream is not the engine's."""
    with device_of(place).stream().active():
        call(*arguments)


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


def test_chunks_in_trimmed_staging_are_the_pools(place: torch.device) -> None:
    header, staging = header_of(4096), StagingMemory(64 << 20)
    (keys, values), slots = (x.to(place) for x in pool(4096)), torch.arange(4096)
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


def test_transfers_one_after_the_other_lock_pages_once(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locking pages takes longer than copying them."""
    locked: list[int] = []
    pinned = device.pinned
    monkeypatch.setattr(device, "pinned", lambda size_bytes: (locked.append(size_bytes), pinned(size_bytes))[1])
    (keys, values), transfer = (x.to(device.torch) for x in pool(64)), chunk_transfer.ChunkTransfer(device)
    for tokens in (8, 16, 40, 64, 40, 64):
        header, slots = header_of(tokens), torch.arange(tokens)
        payload = memoryview(bytearray(header.payload_bytes))
        transfer.pack(dispatch.kernels_for(device.torch).kernels, keys, values, slots, header, payload)
    assert len(locked) == 2, "once for each of a lane's banks"


def read(place: torch.device, pool: Tensor, loaded: LoadedLayers) -> Tensor:
    """Return loaded layers, as a stream sees them that waits for their event."""
    assert loaded.ready is not None
    device_of(place).current_stream().wait(loaded.ready)
    return pool[loaded.layers.start : loaded.layers.stop].cpu()


def test_a_group_of_layers_is_there_when_its_event_is_done(place: torch.device) -> None:
    """The device may still copy the next group then."""
    header, slots, groups = header_of(40), torch.arange(40), [range(1), range(1, 4)]
    stored = pool(40)
    payload = memoryview(packed_by_definition(*stored, slots, header)).toreadonly()
    loaded = tuple(torch.zeros_like(x).to(place) for x in stored)
    for group, layers in zip(
        dispatch.unpack_chunks(*loaded, [ChunkPlacement(header, payload, slots)], groups), groups, strict=True
    ):
        assert group.layers == layers
        for got, expected in zip(loaded, stored, strict=True):
            assert torch.equal(read(place, got, group), expected[layers.start : layers.stop])


def test_groups_are_there_after_the_last_one_is_enqueued(place: torch.device) -> None:
    header, slots, groups = header_of(40), torch.arange(40), [range(1), range(1, 3), range(3, 4)]
    stored = pool(40)
    payload = memoryview(packed_by_definition(*stored, slots, header)).toreadonly()
    loaded = tuple(torch.zeros_like(x).to(place) for x in stored)
    for group in list(dispatch.unpack_chunks(*loaded, [ChunkPlacement(header, payload, slots)], groups)):
        for got, expected in zip(loaded, stored, strict=True):
            assert torch.equal(read(place, got, group), expected[group.layers.start : group.layers.stop])


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_many_chunks_are_loaded_through_few_buffers(
    place: torch.device, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host refills a buffer only after the device has used it, and each group is there after its event."""
    monkeypatch.setattr(chunk_transfer, "BANK_BYTES", 1 << 16)
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
    mine = tuple(x.to(place) for x in mine)
    for group in dispatch.unpack_chunks(*mine, pieces, groups):
        for ours, right in zip(mine, theirs, strict=True):
            assert torch.equal(read(place, ours, group), right[group.layers.start : group.layers.stop])


def test_chunks_of_some_layers_are_loaded_with_those_of_all(place: torch.device) -> None:
    """Tokens outside of the sliding windows, in the launch of their group."""
    header, stored = header_of(40), pool(40)
    payload = memoryview(packed_by_definition(*stored, torch.arange(40), header)).toreadonly()
    near = ChunkPlacement(header, payload, torch.arange(40))
    far = ChunkPlacement(header, payload, torch.arange(40, 80), layers=frozenset({0, 2, 3}))
    loaded = [torch.zeros(LAYERS, HEADS, 80, DIM, dtype=torch.bfloat16).to(place) for _ in range(2)]
    for group in dispatch.unpack_chunks(*loaded, [near, far], [range(2), range(2, 4)]):
        group.wait()
    for got, expected in zip((x.cpu() for x in loaded), stored, strict=True):
        assert torch.equal(got[:, :, :40], expected)
        assert torch.equal(got[[0, 2, 3], :, 40:], expected[[0, 2, 3]])
        assert not got[1, :, 40:].any()


def test_gaps_of_a_payload_keep_their_bytes(place: torch.device) -> None:
    """Device memory holds earlier chunks, perhaps another tenant's; nothing of them leaves in a gap."""
    header = header_of(33, 4)
    payload = bytearray(b"\x11" * header.payload_bytes)
    dispatch.pack_chunk(*(x.to(place) for x in pool(33)), torch.arange(33), header, memoryview(payload))
    covered = np.zeros(len(payload), bool)
    for section in layout_of(header).sections:
        covered[section.offset : section.offset + section.size_bytes] = True
    assert not covered.all()
    assert set(np.frombuffer(payload, np.uint8)[~covered]) == {0x11}


def test_a_launch_that_fails_leaves_no_copy_in_flight(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    header = header_of(40)
    payload = memoryview(bytearray(header.payload_bytes))

    def refuse(*_: object) -> None:
        raise cuda_library.KernelLaunchError("unpack16_bf16: refused")

    with monkeypatch.context() as broken:
        broken.setattr(SimulatedKernels, "launch", refuse)
        keys, values = (x.to(device.torch) for x in pool(40))
        with pytest.raises(cuda_library.KernelLaunchError, match="refused"):
            dispatch.unpack_chunk(keys, values, torch.arange(40), header, payload)
    assert device.num_pending == 0


def test_a_buffer_that_could_not_grow_grows_the_next_time(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, slots = header_of(64), torch.arange(64)
    keys, values = (x.to(device.torch) for x in pool(64))
    transfer, payload = chunk_transfer.ChunkTransfer(device), memoryview(bytearray(header.payload_bytes))
    kernels = dispatch.kernels_for(device.torch).kernels

    def full(_: int) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as short:
        short.setattr(device, "allocate", full)
        for _ in range(2):  # both banks
            with pytest.raises(torch.OutOfMemoryError):
                transfer.pack(kernels, keys, values, slots, header, payload)
    for _ in range(2):
        transfer.pack(kernels, keys, values, slots, header, payload)
    assert bytes(payload) == bytes(packed_by_definition(*pool(64), slots, header))


def test_a_store_has_what_the_engine_enqueued_before(place: torch.device) -> None:
    """The engine's thread does not wait for its own steps; stores run on another thread and stream."""
    header, slots = header_of(40), torch.arange(40)
    keys, values = (x.to(place) for x in pool(40))
    expected = packed_by_definition(keys.cpu() * 2, values.cpu() * 2, slots, header)
    payload = memoryview(bytearray(header.payload_bytes))
    device_place.keep_busy(place)
    keys.mul_(2)
    values.mul_(2)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(on_stream, place, dispatch.pack_chunk, keys, values, slots, header, payload).result()
    assert bytes(payload) == bytes(expected)


def test_a_load_does_not_overtake_the_reader_of_its_slots(place: torch.device) -> None:
    """A canceled prompt's last step may still read the blocks that a load is given."""
    header, slots = header_of(40), torch.arange(40)
    (keys, values), (new_keys, new_values) = (x.to(place) for x in pool(40)), pool(40, seed=1)
    before = keys.cpu().clone()
    payload = memoryview(packed_by_definition(new_keys, new_values, slots, header)).toreadonly()
    device_place.keep_busy(place)
    read = keys.clone()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(on_stream, place, dispatch.unpack_chunk, keys, values, slots, header, payload).result()
    assert torch.equal(read.cpu(), before)
    assert torch.equal(keys.cpu(), new_keys)


def test_loads_and_stores_of_several_threads_are_whole(place: torch.device) -> None:
    header, count = header_of(40), 8
    keys, values = (x.to(place) for x in pool(40 * count))
    copies = torch.zeros_like(keys), torch.zeros_like(values)

    def through_memory(i: int) -> None:
        slots = torch.arange(40 * i, 40 * (i + 1))
        payload = memoryview(bytearray(header.payload_bytes))
        dispatch.pack_chunk(keys, values, slots, header, payload)
        dispatch.unpack_chunk(*copies, slots, header, payload)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(through_memory, range(count)))
    assert torch.equal(copies[0], keys)
    assert torch.equal(copies[1], values)


def test_a_pool_without_kernels_holds_each_group_after_its_event(device: SimulatedDevice) -> None:
    """torch's fallback only enqueues its work, and the reader may use another stream."""
    header, reader = header_of(40), device.stream()
    given = pool(40)
    payload = memoryview(packed_by_definition(*given, torch.arange(40), header)).toreadonly()
    keys, values = (torch.zeros_like(x).to(device.torch) for x in given)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(dispatch, "_cuda_kernels", lambda pool, half: None)
        for group in dispatch.unpack_chunks(
            keys, values, [ChunkPlacement(header, payload, torch.arange(40))], [range(1), range(1, 4)]
        ):
            with reader.active():
                assert torch.equal(read(device.torch, keys, group), given[0][group.layers.start : group.layers.stop])


def test_a_warm_up_runs_the_kernels_of_the_first_request(device: SimulatedDevice) -> None:
    """Without a warm-up, the first request waits until the driver has loaded the kernels."""
    described = SimpleNamespace(_geometry=Geometry(LAYERS, HEADS, DIM, DATA_TYPE_BFLOAT16, 16))
    blocks = KVPool(LAYERS, HEADS, DIM, 256, torch.bfloat16, device.torch)
    DaemonConnector.warm_up(described, blocks)  # type: ignore[arg-type]
    assert set(device.launched) == {"pack16_bf16", "unpack16_bf16"}


def test_no_memory_of_another_process_is_page_locked() -> None:
    """Contract of the client: the daemon replaces pages of staging, and a GPU would keep writing to the old ones."""
    root, parts = Path(__file__).parents[2], ("cache_daemon", "clients/python", "kernels", "inference_svc")
    sources = [p for part in parts for p in (root / part).rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".cpp")]
    assert len(sources) > 300
    assert not [p for p in sources if "HostRegister" in p.read_text()]
