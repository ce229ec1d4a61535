"""Copies between an engine's blocks and the payloads of chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from kvkernels import Payload, pack_chunk, unpack_chunk
from kvkernels.device.visible_devices import device_of, is_device
from kvkernels.paged_gather import Integers, PagedMemory, gather, scatter
from numpy.typing import NDArray
from torch import Tensor

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of, new_header
from kvsidecar.kv_transfer.kv_layout import KVLayout, PagedKVCache

_WARM_UP_TOKENS = 8


def slots_of(blocks: NDArray[Any] | list[int], block_tokens: int) -> Integers:
    """Return the slots of all tokens of some blocks, in order.

    A slot is ``block * block_tokens + token``.
    """
    numbers = np.asarray(blocks, np.int64)
    return (numbers[:, None] * block_tokens + np.arange(block_tokens, dtype=np.int64)).reshape(-1)


class BlockCopier:
    """Copies chunks into and out of a paged KV cache.

    For one thread: the copier owns scratch memory and, on CUDA, a stream.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self._keys = _paged_memory([layer.keys for layer in cache.layers], cache.block_tokens)
        self._values = _paged_memory([layer.values for layer in cache.layers], cache.block_tokens)
        self._stream = device_of(cache.device).stream() if is_device(cache.device) else None

    def warm_up(self) -> None:
        """Compile the kernels for this cache before the first chunk needs them.

        Does not access any block.
        """
        header = new_header(self.cache.geometry, [0] * _WARM_UP_TOKENS, 0)
        payload = memoryview(bytearray(header.payload_bytes))
        nothing = np.full(_WARM_UP_TOKENS, -1, np.int64)
        self.pack(nothing, header, payload)
        for slots in (nothing, nothing[1:]):
            self.unpack(slots, header, payload.toreadonly())

    def pack(self, slots: Integers, header: ChunkHeader, payload: Payload, after: Any = None) -> None:
        """Write the tokens at ``slots`` into a payload, quantized as the header says.

        Returns when the copy is complete. ``after`` is the device event that the engine recorded after it enqueued the
        writes of these tokens. Raises ValueError for slots outside of the cache.
        """
        self._check(slots)
        with self._on_stream(after):
            if isinstance(payload, memoryview) and self._copies_directly(header):
                arrays = layout_of(header).arrays(payload)
                gather(self._keys, slots, arrays["keys"])
                gather(self._values, slots, arrays["values"])
                return
            keys, values = self._scratch(len(slots))
            gather(self._keys, slots, keys.transpose(1, 2))
            gather(self._values, slots, values.transpose(1, 2))
            self._wait()
            pack_chunk(keys, values, torch.arange(len(slots)), header, payload)

    def unpack(self, slots: Integers, header: ChunkHeader, payload: Payload, after: Any = None) -> None:
        """Write the first ``len(slots)`` tokens of a payload to ``slots``, dequantized.

        Returns when the copy is complete. Skips tokens with a negative slot. ``after`` is the device event that the
        engine recorded after it enqueued its last use of the slots. Raises ValueError for slots outside of the cache.
        """
        self._check(slots)
        with self._on_stream(after):
            if isinstance(payload, memoryview) and self._copies_directly(header):
                arrays = layout_of(header).arrays(payload)
                scatter(self._keys, slots, arrays["keys"][:, : len(slots)])
                scatter(self._values, slots, arrays["values"][:, : len(slots)])
                return
            keys, values = self._scratch(len(slots))
            self._wait()  # the chunk kernels run on another stream
            unpack_chunk(keys, values, torch.arange(len(slots)), header, payload)
            scatter(self._keys, slots, keys.transpose(1, 2))
            scatter(self._values, slots, values.transpose(1, 2))
            self._wait()

    def _check(self, slots: Integers) -> None:
        """Refuse slots outside of the cache.

        The kernels check no bounds, and would write into other memory.
        """
        end = self.cache.blocks * self.cache.block_tokens
        if len(slots) and slots.max() >= end:
            raise ValueError(f"slot {slots.max()} is outside of the cache, whose last one is {end - 1}")

    def _copies_directly(self, header: ChunkHeader) -> bool:
        """Return whether payload and cache have the same element type, both in host memory."""
        return header.bits == 16 and self._stream is None

    def _scratch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Allocate keys and values ``[layers, kv_heads, tokens, head_dim]``, the layout of the chunk kernels."""
        g = self.cache.geometry
        shape = (2, g.layers, g.kv_heads, tokens, g.head_dim)
        both = torch.zeros(shape, dtype=self.cache.dtype, device=self.cache.device)
        return both[0], both[1]

    @contextlib.contextmanager
    def _on_stream(self, after: Any) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with device_of(self.cache.device).guard(), self._stream.active():
            if after is not None:
                self._stream.wait(after)
            yield

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _paged_memory(layouts: list[KVLayout], block_tokens: int) -> PagedMemory:
    token, head, channel = layouts[0].offset_tables()
    return PagedMemory(
        tuple(layout.flat_memory() for layout in layouts), block_tokens, layouts[0].block_stride, token, head, channel
    )
