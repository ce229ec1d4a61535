"""Chunk transfer: payloads between host memory and a device, by the copy engine and a pinned ring.

The kernels read and write payloads only in device memory. The pinned memory belongs to this process alone.
Page-locking the daemon's arena or staging would corrupt chunks: the device keeps the locked pages, while the daemon
replaces those of idle staging.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.chunk_payload import ChunkPlacement, DeviceBytes
from kvkernels.cuda import cuda_kv_pack, imported_memory
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.device.device_port import Device, Event

_NUM_LANES = 2  # transfers at one time; others wait
_NUM_BANKS = 2  # the host fills one while the device copies another
_BANK_BYTES = 128 << 20  # largest bank; a larger layer group takes several turns
_GRANULARITY = 1 << 20
_ALIGNMENT = 256


class _Bank:
    """Pinned memory and device memory of equal size, at the same offsets. Grows to the largest batch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.size_bytes = 0
        self.copied: Event | None = None  # the device has read the pinned memory
        self.unpacked: Event | None = None  # kernels have read the device memory

    def prepare(self, size_bytes: int) -> None:
        """Wait until the host may write the pinned memory, and make both large enough."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        if size_bytes > self.size_bytes:
            if self.unpacked is not None:
                self.unpacked.synchronize()
            self.size_bytes = -(-size_bytes // _GRANULARITY) * _GRANULARITY
            self.pinned = self._device.pinned(self.size_bytes)
            self.scratch = self._device.allocate(self.size_bytes)
            self.copied = self.unpacked = None
        self._device.check_host_access(self.pinned[:size_bytes], write=True)


@dataclass(frozen=True)
class _Part:
    """Some layers of one chunk, at an offset of a bank: slots, rotation, then the layers of each section.

    A payload in device memory is read there; only its slots and rotation are in the bank.
    """

    piece: ChunkPlacement
    layers: range
    at: int

    @property
    def size_bytes(self) -> int:
        if isinstance(self.piece.payload, DeviceBytes):
            return self.sections_at
        return self.sections_at + sum(size for _, _, size in self.sections())

    @property
    def sections_at(self) -> int:
        rotation = self.piece.rotation
        turned = 0 if rotation is None else sum(_aligned(part.nbytes) for part in rotation)
        return _aligned(self.piece.slots.nbytes) + turned

    def sections(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, the offset in the payload and the size of each section's layers."""
        header = self.piece.header
        for section in layout_of(header).sections:
            layer = section.size_bytes // header.layers
            yield section.name, section.offset + self.layers.start * layer, len(self.layers) * layer

    def fill(self, pinned: NDArray[np.uint8]) -> None:
        """Gather the part into pinned memory, which begins at its offset."""
        at, payload = 0, self.piece.payload
        for array in (self.piece.slots.numpy(), *(self.piece.rotation or ())):
            pinned[at : at + array.nbytes] = array.view(np.uint8)
            at += _aligned(array.nbytes)
        if isinstance(payload, DeviceBytes):
            return
        source = np.frombuffer(payload, np.uint8)
        for _, offset, size in self.sections():
            np.copyto(pinned[at : at + size], source[offset : offset + size])
            at += size

    def unpack(self, kernels: Kernels, keys: Tensor, values: Tensor, scratch: Tensor) -> None:
        """Enqueue the kernel on the current stream; ``scratch`` begins at the part's offset."""
        header, payload = self.piece.header, self.piece.payload
        slots, rotation = scratch[: self.piece.slots.nbytes].view(torch.int64), self._rotation(scratch)
        if isinstance(payload, DeviceBytes):
            address = imported_memory.checked_address(payload)
            cuda_kv_pack.unpack(kernels, keys, values, slots, header, address, rotation, self.layers)
            return
        offsets, at = dict[str, int](), self.sections_at
        for name, _, size in self.sections():
            # The kernel adds the first layer's offset again.
            offsets[name] = at - self.layers.start * (size // len(self.layers))
            at += size
        address = scratch.data_ptr()
        cuda_kv_pack.unpack(kernels, keys, values, slots, header, address, rotation, self.layers, offsets)

    def _rotation(self, scratch: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.piece.rotation is None:
            return None
        at, found = _aligned(self.piece.slots.nbytes), list[Tensor]()
        for array in self.piece.rotation:
            found.append(scratch[at : at + array.nbytes].view(torch.float32))
            at += _aligned(array.nbytes)
        return found[0], found[1]


class _Lane:
    """Streams and buffers of one transfer at a time.

    A transfer holds one lane while it runs. A bank is a buffer of the lane, in pinned and in device memory.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.copies, self.kernels = device, device.stream(), device.stream()
        self.banks = [_Bank(device) for _ in range(_NUM_BANKS)]
        self._next = 0

    def begin(self) -> None:
        """Order the lane after the engine's work so far, whose last step may still read or write the pool's slots."""
        device = self.device
        self.kernels.wait_stream(device.default_stream())
        self.kernels.wait_stream(device.current_stream())  # another engine's copies

    def next_bank(self, size_bytes: int) -> _Bank:
        bank = self.banks[self._next]
        self._next = (self._next + 1) % _NUM_BANKS
        bank.prepare(size_bytes)
        return bank

    def finish(self) -> None:
        """Wait for all enqueued work."""
        self.copies.synchronize()
        self.kernels.synchronize()


class ChunkTransfer:
    """Packs and unpacks chunks in host memory with a device's kernels. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        for _ in range(_NUM_LANES):
            self._lanes.put(_Lane(device))

    def pack(
        self, kernels: Kernels, keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: memoryview
    ) -> None:
        """Pack the pool's tokens at ``slots`` into a payload. Returns when its bytes are written."""
        at, size = _aligned(slots.nbytes), header.payload_bytes
        with self._lane() as lane:
            lane.begin()
            bank, stream = lane.next_bank(at + size), lane.kernels
            bank.pinned[: slots.nbytes].numpy()[:] = slots.numpy().view(np.uint8)
            stream.copy(bank.scratch[: slots.nbytes], bank.pinned[: slots.nbytes])
            with stream.active():
                there = bank.scratch[: slots.nbytes].view(torch.int64)
                cuda_kv_pack.pack(kernels, keys, values, there, header, bank.scratch[at:].data_ptr())
            sections = [(s.offset, s.size_bytes) for s in layout_of(header).sections if s.size_bytes]
            for offset, length in sections:
                part = slice(at + offset, at + offset + length)
                stream.copy(bank.pinned[part], bank.scratch[part])
            stream.synchronize()
            bank.copied = bank.unpacked = None
            lane.device.check_host_access(bank.pinned[at : at + size], write=False)
            packed, target = bank.pinned.numpy()[at:], np.frombuffer(payload, np.uint8)
            for offset, length in sections:  # not the gaps, which hold bytes of earlier chunks
                np.copyto(target[offset : offset + length], packed[offset : offset + length])

    def unpack(
        self,
        kernels: Kernels,
        keys: Tensor,
        values: Tensor,
        pieces: Sequence[ChunkPlacement],
        groups: Sequence[range],
    ) -> Iterator[range]:
        """Unpack chunks into the pool; yield each group of layers once the pool contains it.

        The host enqueues a group, then waits for the one before: the link does not pause between groups.
        """
        imported = any(isinstance(piece.payload, DeviceBytes) for piece in pieces)
        with self._lane() as lane:
            lane.begin()
            if imported:
                for layers in groups:
                    with imported_memory.in_use():
                        self._enqueue(lane, kernels, keys, values, pieces, layers).synchronize()
                    yield layers
                return
            waiting: tuple[range, Event] | None = None
            for layers in groups:
                done = self._enqueue(lane, kernels, keys, values, pieces, layers)
                if waiting is not None:
                    waiting[1].synchronize()
                    yield waiting[0]
                waiting = layers, done
            if waiting is not None:
                waiting[1].synchronize()
                yield waiting[0]

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._lanes.get()
        try:
            yield lane
        except BaseException:
            # The device may still read memory of the caller's pool.
            with contextlib.suppress(RuntimeError):
                lane.finish()
            raise
        finally:
            self._lanes.put(lane)

    def _enqueue(
        self,
        lane: _Lane,
        kernels: Kernels,
        keys: Tensor,
        values: Tensor,
        pieces: Sequence[ChunkPlacement],
        layers: range,
    ) -> Event:
        """Enqueue a group's copies and kernels; return an event after the last kernel."""
        for batch in _batches(pieces, layers):
            size = batch[-1].at + batch[-1].size_bytes
            bank = lane.next_bank(size)
            if bank.unpacked is not None:
                lane.copies.wait(bank.unpacked)
            pinned = bank.pinned.numpy()
            for part in batch:
                end = part.at + part.size_bytes
                part.fill(pinned[part.at : end])
                lane.copies.copy(bank.scratch[part.at : end], bank.pinned[part.at : end])
            bank.copied = lane.device.event()
            bank.copied.record(lane.copies)
            lane.kernels.wait(bank.copied)
            with lane.kernels.active():
                for part in batch:
                    part.unpack(kernels, keys, values, bank.scratch[part.at :])
            bank.unpacked = lane.device.event()
            bank.unpacked.record(lane.kernels)
        done = lane.device.event()
        done.record(lane.kernels)
        return done


def _batches(pieces: Sequence[ChunkPlacement], layers: range) -> Iterator[list[_Part]]:
    """Divide a group's pieces into batches that fit a bank."""
    batch: list[_Part] = []
    for piece in pieces:
        at = _aligned(batch[-1].at + batch[-1].size_bytes) if batch else 0
        part = _Part(piece, layers, at)
        if batch and at + part.size_bytes > _BANK_BYTES:
            yield batch
            batch, part = [], _Part(piece, layers, 0)
        batch.append(part)
    if batch:
        yield batch


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
