"""Chunk transfer: payloads between host memory and a device, through pinned buffers.

The kernels read and write payloads only in device memory; the copy engine moves the bytes. The pinned buffers belong to
this process alone. Page-locking the daemon's arena or staging would be wrong: a device keeps the pages of the moment of
page-locking, and the daemon replaces pages of idle staging, so a device would write to pages that no process sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from torch import Tensor

from kvkernels.chunk_payload import ChunkPlacement, DeviceBytes
from kvkernels.cuda import cuda_kv_pack, imported_memory
from kvkernels.cuda.copy_engine import CopyEngine
from kvkernels.cuda.cuda_library import Kernels

_NUM_BUFFERS = 3  # the host fills one while the device copies another
_ALIGNMENT = 1 << 20


class _Buffer:
    """Pinned memory and device memory of equal size. Grows to the largest payload."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self.size_bytes = 0
        self.used: Callable[[], object] = lambda: None  # waits for the device's last use

    def prepare(self, size_bytes: int) -> None:
        """Wait until the buffer is free, and make it large enough."""
        self.used()
        if size_bytes > self.size_bytes:
            self.size_bytes = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
            self.pinned, self.scratch = self._engine.pinned(self.size_bytes), self._engine.scratch(self.size_bytes)


class ChunkTransfer:
    """Packs and unpacks chunks in host memory with a device's kernels. Thread-safe."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._buffers = [_Buffer(engine) for _ in range(_NUM_BUFFERS)]
        self._next = 0

    def pack(
        self, kernels: Kernels, keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: memoryview
    ) -> None:
        """Pack the pool's tokens at ``slots`` into a payload. Returns when its bytes are written."""
        size = header.payload_bytes
        with self._lock, self._engine.ordered():
            buffer = self._buffer(size)
            try:
                cuda_kv_pack.pack(kernels, keys, values, slots.to(keys.device), header, buffer.scratch.data_ptr())
                self._engine.copy(buffer.pinned[:size], buffer.scratch[:size])
            finally:
                self._engine.synchronize()
            packed, target = buffer.pinned.numpy(), np.frombuffer(payload, np.uint8)
            for section in layout_of(header).sections:  # not the gaps, which hold bytes of earlier chunks
                part = slice(section.offset, section.offset + section.size_bytes)
                np.copyto(target[part], packed[part])

    def unpack(
        self, kernels: Kernels, keys: Tensor, values: Tensor, pieces: Sequence[ChunkPlacement], layers: range
    ) -> None:
        """Unpack some layers of chunks into the pool. Returns when the pool contains them."""
        with self._lock, imported_memory.in_use(), self._engine.ordered():
            try:
                for piece in pieces:
                    self._unpack(kernels, keys, values, piece, layers)
            finally:
                self._engine.synchronize()

    def _unpack(self, kernels: Kernels, keys: Tensor, values: Tensor, piece: ChunkPlacement, layers: range) -> None:
        rotation = None
        if piece.rotation is not None:
            cosine, sine = (torch.from_numpy(x).to(keys.device) for x in piece.rotation)
            rotation = cosine, sine
        slots, payload = piece.slots.to(keys.device), piece.payload
        if isinstance(payload, DeviceBytes):
            address = imported_memory.checked_address(payload)
            cuda_kv_pack.unpack(kernels, keys, values, slots, piece.header, address, rotation, layers)
            return
        buffer = self._sent(piece.header, payload, layers)
        address = buffer.scratch.data_ptr()
        cuda_kv_pack.unpack(kernels, keys, values, slots, piece.header, address, rotation, layers)
        buffer.used = self._engine.mark()

    def _sent(self, header: ChunkHeader, payload: memoryview, layers: range) -> _Buffer:
        """Send some layers of a payload to a buffer, each section at its offset."""
        buffer, source = self._buffer(header.payload_bytes), np.frombuffer(payload, np.uint8)
        pinned = buffer.pinned.numpy()
        for section in layout_of(header).sections:
            layer_bytes = section.size_bytes // header.layers
            if layer_bytes:
                part = slice(section.offset + layers.start * layer_bytes, section.offset + layers.stop * layer_bytes)
                np.copyto(pinned[part], source[part])
                self._engine.copy(buffer.scratch[part], buffer.pinned[part])
        return buffer

    def _buffer(self, size_bytes: int) -> _Buffer:
        """Take the buffer whose use by the device is the longest ago."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        buffer.prepare(size_bytes)
        return buffer
