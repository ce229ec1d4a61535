"""Lossless payload codec: compresses with zstd the byte planes that are not noise.

In a trained model's keys and values, sign and mantissa are noise and exponents have about three bits of entropy. So the
codec splits the bytes of all elements into planes (little-endian: the last plane holds the exponents), and compresses a
plane if that saves at least a twentieth of it. In such data, zstd's matches of fewer than seven bytes are coincidences:
without them zstd is faster and its output smaller. Blocks of 256 KiB keep the planes in the processor's cache.

Format: ``uint8 element bytes, 7 zero bytes``, then per block ``uint32 length`` of each plane (little-endian) and the
planes. A plane with as many bytes as the block has elements is stored raw. The last block may be shorter. Bytes after
the last whole element of the payload follow raw. All heavy parts run without the GIL.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import zstandard
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32, ChunkHeader
from numpy.typing import NDArray

RAW, PLANES = 0, 1
_BLOCK_BYTES = 256 << 10
_HEADER_BYTES = 8
_MAX_RATIO = 0.95
_SAMPLE_BYTES = 64 << 10
# Sampling for noisy planes takes as long as compressing a small payload. Noise is a property of the model, so one of
# this many payloads is sampled.
_SAMPLE_EVERY = 16
_MAX_ROOTS = 256
_local = threading.local()
Bytes = NDArray[np.uint8]


@lru_cache(1)
def _parameters() -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters(
        window_log=17,
        strategy=zstandard.STRATEGY_FAST,
        compression_level=1,
        min_match=7,
        write_checksum=False,
    )


def _compressor() -> Any:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_parameters())
    return _local.compressor


def _decompressor() -> Any:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor


def element_bytes(header: ChunkHeader) -> int:
    """Return the element size of a chunk's payload in bytes."""
    if header.bits != 16:
        return 1
    return 4 if header.dtype == DATA_TYPE_FLOAT32 else 2


class PlaneCompressor:
    """Compresses payloads and caches the compressible planes of each root.

    Thread-safe: at worst two threads sample the same payload.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], tuple[frozenset[int], int]] = {}

    def compress(self, header: ChunkHeader, payload: memoryview) -> bytes | None:
        """Return the compressed payload, or None when compression does not pay off."""
        element = element_bytes(header)
        return compress(payload, element, self._planes(header.root, payload, element))

    def _planes(self, root: bytes, payload: memoryview, element: int) -> frozenset[int]:
        planes, uses = self._known.get((root, element), (frozenset(), 0))
        if not planes or uses == 0:  # a payload of noise says nothing about the next one
            planes = compressible_planes(payload, element)
            if len(self._known) >= _MAX_ROOTS:
                self._known.clear()
        self._known[root, element] = planes, (uses + 1) % _SAMPLE_EVERY
        return planes


def compress(payload: memoryview, element: int, planes: frozenset[int] | None = None) -> bytes | None:
    """Return the compressed payload, or None when compression does not pay off.

    ``planes`` are the planes to compress; None chooses them by a sample of the payload.
    """
    raw = np.frombuffer(payload, np.uint8)
    planes = compressible_planes(payload, element) if planes is None else planes
    if not planes:
        return None
    parts: list[bytes | Bytes] = [bytes([element]).ljust(_HEADER_BYTES, b"\0")]
    for begin in range(0, len(raw), _BLOCK_BYTES):
        block = raw[begin : begin + _BLOCK_BYTES]
        count = len(block) // element
        stored: list[bytes | Bytes] = []
        for plane in range(element):
            plain = np.ascontiguousarray(block[plane : count * element : element])
            small = _compressor().compress(plain) if plane in planes and count else plain
            stored.append(small if len(small) < count else plain)
        parts.append(np.array([len(part) for part in stored], "<u4").tobytes())
        parts += stored
        parts.append(block[count * element :])
    packed = b"".join(parts)  # type: ignore[arg-type]
    return packed if len(packed) < _MAX_RATIO * len(raw) else None


def compressible_planes(payload: memoryview, element: int) -> frozenset[int]:
    """Return the planes whose sample shrinks.

    The sample is from the middle: a payload may begin and end with special rows.
    """
    raw = np.frombuffer(payload, np.uint8)
    whole = len(raw) // element * element
    begin = max(0, (whole - _SAMPLE_BYTES * element) // 2) // element * element
    found = set()
    for plane in range(element):
        sample = np.ascontiguousarray(raw[begin + plane : min(whole, begin + _SAMPLE_BYTES * element) : element])
        if len(sample) and len(_compressor().compress(sample)) < _MAX_RATIO * len(sample):
            found.add(plane)
    return frozenset(found)


def decompress(packed: memoryview, target: memoryview) -> None:
    """Fill ``target`` with the raw payload. Raises ValueError when ``packed`` is corrupt or has another raw length."""
    source, out = np.frombuffer(packed, np.uint8), np.frombuffer(target, np.uint8)
    element = int(source[0]) if len(source) >= _HEADER_BYTES else 0
    if element not in (1, 2, 4):
        raise ValueError(f"elements of {element} bytes; 1, 2 and 4 are known")
    at = _HEADER_BYTES
    for begin in range(0, len(out), _BLOCK_BYTES):
        block = out[begin : begin + _BLOCK_BYTES]
        count = len(block) // element
        if at + 4 * element > len(source):
            raise ValueError("the packed payload ends early")
        lengths = [int(n) for n in np.frombuffer(packed[at : at + 4 * element], "<u4")]
        at += 4 * element
        planes = []
        for length in lengths:
            if at + length > len(source):
                raise ValueError("the packed payload ends early")
            planes.append(_plane(source[at : at + length], count))
            at += length
        _merge(planes, block[: count * element])
        tail = len(block) - count * element
        if at + tail > len(source):
            raise ValueError("the packed payload ends early")
        block[count * element :] = source[at : at + tail]
        at += tail
    if at != len(source):
        raise ValueError("bytes follow the packed payload")


def _plane(stored: Bytes, count: int) -> Bytes:
    if len(stored) == count:
        return stored
    try:
        frame = zstandard.get_frame_parameters(stored[:18].tobytes())
        if frame.content_size != count:
            raise ValueError(f"a plane of {frame.content_size} bytes where {count} are needed")
        return np.frombuffer(_decompressor().decompress(stored, max_output_size=count), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane cannot be unpacked: {error}") from error


def _merge(planes: list[Bytes], block: Bytes) -> None:
    if any(len(plane) * len(planes) != len(block) for plane in planes):
        raise ValueError("a plane has another length than its block")
    if len(planes) == 2:
        low, high = planes
        words = block.view("<u2")
        words[:] = high
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, low, out=words)
        return
    for position, plane in enumerate(planes):
        block[position :: len(planes)] = plane
