"""Chunk transfer: payloads between host memory and a device, by the copy engine and a pinned ring.

A load fills pinned memory, copies it to the device, and unpacks it there: one kernel launch and one event for each
group of layers. Device work is ordered by events; the host waits only before it writes pinned memory again, which
happens at most once for each group that fits a bank.

The pinned memory belongs to this process alone. Page-locking the daemon's arena or staging would corrupt chunks: the
device keeps using the locked pages, while the daemon replaces the pages of idle staging.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.chunk_payload import ChunkPlacement, DeviceBytes, LoadedLayers
from kvkernels.cuda import cuda_kv_pack, imported_memory
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.cuda.piece_table import PieceTable, TablePiece, sections_at
from kvkernels.device.device_port import Device, Event, Stream

# A group of layers up to this size is one batch, with one launch and at most one wait of the host.
BANK_BYTES = 128 << 20
_NUM_LANES = 2  # transfers at one time; further transfers wait
_NUM_BANKS = 2  # the host fills one while the device copies another
_MIN_BANK_BYTES = 32 << 20  # locking pages takes longer than their copy, so the warm-up locks what most loads need
_COPY_BYTES = 4 << 20  # minimal size of a copy, except the last copy of a batch
_GRANULARITY = 1 << 20
_ALIGNMENT = 256


class _Bank:
    """Pinned memory and device memory of equal size, at the same offsets. Grows to the largest batch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.size_bytes = 0
        self.copied: Event | None = None  # the device has read the pinned memory
        self.unpacked: Event | None = None  # kernels have read the device memory

    def prepare(self, size_bytes: int, copies: Stream, kernels: Stream) -> None:
        """Wait until the host may write the pinned memory, and make both memories large enough."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        if size_bytes > self.size_bytes:
            self._grow(size_bytes, kernels)
            copies.wait_stream(kernels)  # earlier kernels may still use the memory that was allocated
        elif self.unpacked is not None:
            copies.wait(self.unpacked)
        self._device.check_host_access(self.pinned[:size_bytes], write=True)

    def _grow(self, size_bytes: int, kernels: Stream) -> None:
        """Replace both memories. The old device memory is reused only after the kernels that read it."""
        wanted = max(size_bytes, min(2 * self.size_bytes, BANK_BYTES), _MIN_BANK_BYTES)
        size = -(-wanted // _GRANULARITY) * _GRANULARITY
        pinned = self._device.pinned(size)
        with kernels.active():
            self.scratch = self._device.allocate(size)
        self.size_bytes, self.pinned = size, pinned  # only now: each allocation may fail
        self.copied = self.unpacked = None


@dataclass(frozen=True)
class _Part:
    """Some layers of one chunk; in a bank at ``at`` if the payload is in host memory."""

    piece: ChunkPlacement
    layers: range
    at: int

    @property
    def kind(self) -> tuple[bool, int]:
        """Location of the payload, and bits per element: equal for all parts of a batch."""
        return isinstance(self.piece.payload, DeviceBytes), self.piece.header.bits

    @property
    def end(self) -> int:
        return self.at + sum(_aligned(size) for _, _, size in self._sections())

    def _sections(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name of each section to copy, and the place and size of its layers in the payload."""
        header = self.piece.header
        if isinstance(self.piece.payload, DeviceBytes):
            return
        for section in layout_of(header).sections:
            layer = section.size_bytes // header.layers
            yield section.name, section.offset + self.layers.start * layer, len(self.layers) * layer

    def fill(self, pinned: NDArray[np.uint8]) -> None:
        """Gather the part into a bank's pinned memory."""
        payload, at = self.piece.payload, self.at
        if isinstance(payload, DeviceBytes):
            return
        source = np.frombuffer(payload, np.uint8)
        for _, offset, size in self._sections():
            np.copyto(pinned[at : at + size], source[offset : offset + size])
            at += _aligned(size)

    def row(self, base: int) -> TablePiece:
        """Return the part's piece of a table; ``base`` is the lowest address of payloads in device memory."""
        piece, sections, at = self.piece, dict[str, int](), self.at
        if isinstance(piece.payload, DeviceBytes):
            sections = sections_at(piece.header, imported_memory.checked_address(piece.payload) - base)
        for name, _, size in self._sections():
            # The kernel adds the first layer's offset again.
            sections[name] = at - self.layers.start * (size // len(self.layers))
            at += _aligned(size)
        return TablePiece(piece.header, piece.slots, self.layers, sections, piece.rotation)


class _Batch:
    """Parts that one launch unpacks: payloads, then their table."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        payloads = [part.piece.payload for part in parts]
        self._parts = parts
        # Lowest address of the payloads in device memory; 0 if they are in the bank.
        self._base = min(payload.address if isinstance(payload, DeviceBytes) else 0 for payload in payloads)
        self._table = PieceTable([part.row(self._base) for part in parts])
        self._table_at = _aligned(parts[-1].end)
        self.size_bytes = self._table_at + self._table.size_bytes

    def send(self, bank: _Bank, copies: Stream) -> None:
        """Fill the bank's pinned memory, and enqueue copies of the filled parts."""
        pinned, sent = bank.pinned.numpy(), 0
        for part in self._parts:
            part.fill(pinned)
            if part.end - sent >= _COPY_BYTES:
                copies.copy(bank.scratch[sent : part.end], bank.pinned[sent : part.end])
                sent = part.end
        self._table.write(pinned[self._table_at :])
        copies.copy(bank.scratch[sent : self.size_bytes], bank.pinned[sent : self.size_bytes])

    def unpack(self, kernels: Kernels, keys: Tensor, values: Tensor, scratch: Tensor) -> None:
        """Enqueue the kernel on the current stream."""
        address = scratch.data_ptr()
        cuda_kv_pack.unpack(kernels, keys, values, self._table, address + self._table_at, self._base or address)


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
        bank.prepare(size_bytes, self.copies, self.kernels)
        return bank

    def finish(self) -> None:
        """Wait for all enqueued work."""
        self.copies.synchronize()
        self.kernels.synchronize()


class ChunkTransfer:
    """Packs and unpacks chunks in host memory with a device's kernels. Thread-safe."""

    def __init__(self, device: Device) -> None:
        # Last in, first out: transfers one after the other use one lane, whose banks have grown.
        self._lanes: queue.LifoQueue[_Lane] = queue.LifoQueue()
        for _ in range(_NUM_LANES):
            self._lanes.put(_Lane(device))

    def pack(
        self, kernels: Kernels, keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: memoryview
    ) -> None:
        """Pack the pool's tokens at ``slots`` into a payload. Returns when its bytes are written."""
        at, layers = _aligned(header.payload_bytes), range(header.layers)
        table = PieceTable([TablePiece(header, slots, layers, sections_at(header))], packs=True)
        with self._lane() as lane:
            lane.begin()
            bank, stream, end = lane.next_bank(at + table.size_bytes), lane.kernels, at + table.size_bytes
            table.write(bank.pinned.numpy()[at:])
            stream.copy(bank.scratch[at:end], bank.pinned[at:end])
            with stream.active():
                address = bank.scratch.data_ptr()
                cuda_kv_pack.pack(kernels, keys, values, table, address + at, address)
            sections = [(s.offset, s.size_bytes) for s in layout_of(header).sections if s.size_bytes]
            for offset, length in sections:
                part = slice(offset, offset + length)
                stream.copy(bank.pinned[part], bank.scratch[part])
            stream.synchronize()
            bank.copied = bank.unpacked = None
            lane.device.check_host_access(bank.pinned[:at], write=False)
            packed, target = bank.pinned.numpy(), np.frombuffer(payload, np.uint8)
            for offset, length in sections:  # not the gaps, which hold bytes of earlier chunks
                np.copyto(target[offset : offset + length], packed[offset : offset + length])

    def unpack(
        self,
        kernels: Kernels,
        keys: Tensor,
        values: Tensor,
        pieces: Sequence[ChunkPlacement],
        groups: Sequence[range],
    ) -> Generator[LoadedLayers, None, None]:
        """Enqueue unpacking of chunks into the pool; yield each group of layers with the event of its arrival.

        Payloads in host memory are read before their group is yielded. Payloads in imported device memory are read
        until the event, so this method waits for the event.
        """
        imported = any(isinstance(piece.payload, DeviceBytes) for piece in pieces)
        with self._lane() as lane:
            lane.begin()
            for layers in groups:
                with imported_memory.in_use() if imported else contextlib.nullcontext():
                    ready = self._enqueue(lane, kernels, keys, values, pieces, layers)
                    if imported:
                        ready.synchronize()
                yield LoadedLayers(layers, ready)

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
        """Enqueue a group's copies and kernel; return an event after the kernel."""
        for parts in _divided(pieces, layers):
            batch = _Batch(parts)
            bank = lane.next_bank(batch.size_bytes)
            batch.send(bank, lane.copies)
            bank.copied = lane.device.event()
            bank.copied.record(lane.copies)
            lane.kernels.wait(bank.copied)
            with lane.kernels.active():
                batch.unpack(kernels, keys, values, bank.scratch)
            bank.unpacked = lane.device.event()
            bank.unpacked.record(lane.kernels)
        ready = lane.device.event()
        ready.record(lane.kernels)
        return ready


def _divided(pieces: Sequence[ChunkPlacement], layers: range) -> Iterator[list[_Part]]:
    """Divide a group's pieces into parts of batches that fit a bank."""
    parts: list[_Part] = []
    for piece in pieces:
        for run in piece.runs_in(layers):
            part = _Part(piece, run, parts[-1].end if parts else 0)
            if parts and (part.end > BANK_BYTES or part.kind != parts[0].kind):
                yield parts
                parts, part = [], _Part(piece, run, 0)
            parts.append(part)
    if parts:
        yield parts


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
