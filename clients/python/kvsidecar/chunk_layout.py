"""Layout of a chunk's payload: its sections and their offsets.

The layout follows from the header alone; the first comment of ``protos/kvsidecar/cache/v1/chunk.proto`` is the
specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from kvsidecar.cache.v1.chunk_pb2 import (
    DATA_TYPE_BFLOAT16,
    DATA_TYPE_FLOAT16,
    DATA_TYPE_FLOAT32,
    ChunkHeader,
    DataType,
    NamespaceDescriptor,
)
from kvsidecar.errors import InvalidRequest
from kvsidecar.keys import FORMAT_VERSION

if TYPE_CHECKING:
    from numpy.typing import NDArray

SECTION_ALIGNMENT = 64
# bfloat16 has no NumPy type; its bits are held in uint16.
STORAGE_TYPE: dict[int, str] = {DATA_TYPE_FLOAT32: "<f4", DATA_TYPE_FLOAT16: "<u2", DATA_TYPE_BFLOAT16: "<u2"}
KEY_GROUP_TOKENS = {16: 0, 8: 256, 4: 32}
SINK_TOKENS = 4
MAX_CHUNK_TOKENS = 4096
# Maximal numbers in a Match: of chunk ends, of tokens, and of content probes.
MAX_CUTS = 8192
MAX_MATCH_TOKENS, MAX_PROBES = 1 << 20, 4096
# Longest TTL of a request: 30 days.
MAX_TTL_SECONDS = 30 * 86400


@dataclass(frozen=True)
class Section:
    """One array of a payload; ``offset`` is in bytes from the payload's start."""

    name: str
    offset: int
    shape: tuple[int, ...]
    type: str
    """NumPy's name of the element type, which ends with its size in bytes: ``<f4``."""

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * int(self.type[-1])


@dataclass(frozen=True)
class Geometry:
    """A model's KV geometry; with the number of tokens, it determines a payload's layout."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DataType.ValueType
    bits: int

    @classmethod
    def of(cls, described: ChunkHeader | NamespaceDescriptor) -> Geometry:
        return cls(described.layers, described.kv_heads, described.head_dim, described.dtype, described.bits)


@dataclass(frozen=True)
class Layout:
    """Sections of one payload, and its length in bytes."""

    sections: tuple[Section, ...]
    size_bytes: int

    def arrays(self, payload: memoryview) -> dict[str, NDArray[Any]]:
        """Return views of the sections of ``payload``, which must be ``size_bytes`` long; copies nothing."""
        import numpy as np  # lazy: the command line and the gateway read no payloads

        return {s.name: np.frombuffer(payload, s.type, prod(s.shape), s.offset).reshape(s.shape) for s in self.sections}


@lru_cache(maxsize=1024)
def layout(geometry: Geometry, tokens: int, key_group_tokens: int, sink_tokens: int) -> Layout:
    """Compute the layout of a payload. Raises InvalidRequest when a parameter is out of range."""
    g = geometry
    if g.bits not in KEY_GROUP_TOKENS:
        raise InvalidRequest(f"bits is {g.bits}; allowed are 16, 8 and 4")
    if g.dtype not in STORAGE_TYPE:
        raise InvalidRequest(f"dtype is {g.dtype}; allowed are 1 (float32), 2 (float16) and 3 (bfloat16)")
    if min(g.layers, g.kv_heads, g.head_dim) < 1 or g.head_dim % 2:
        raise InvalidRequest(
            f"geometry is {g.layers} layers, {g.kv_heads} heads, {g.head_dim} channels; "
            "each must be at least 1 and channels even"
        )
    if not 1 <= tokens <= MAX_CHUNK_TOKENS:
        raise InvalidRequest(f"the chunk has {tokens} tokens; allowed are 1 to {MAX_CHUNK_TOKENS}")
    if not 0 <= sink_tokens <= tokens:
        raise InvalidRequest(f"sink_tokens is {sink_tokens}; allowed are 0 to the chunk's {tokens} tokens")
    element = STORAGE_TYPE[g.dtype]
    whole = (g.layers, tokens, g.kv_heads, g.head_dim)
    parts: list[tuple[str, tuple[int, ...], str]]
    if g.bits == 16:
        if key_group_tokens or sink_tokens:
            raise InvalidRequest("key_group_tokens and sink_tokens must be 0 when bits is 16")
        parts = [("keys", whole, element), ("values", whole, element)]
    else:
        if key_group_tokens < 1:
            raise InvalidRequest(f"key_group_tokens is {key_group_tokens}; it must be at least 1 below 16 bits")
        codes = (g.layers, tokens, g.kv_heads, g.head_dim * g.bits // 8)
        per_channel = (g.layers, -(-tokens // key_group_tokens), g.kv_heads, g.head_dim)
        sinks = (g.layers, sink_tokens, g.kv_heads, g.head_dim)
        parts = [
            ("keys", codes, "|u1"),
            ("values", codes, "|u1"),
            ("key_scale", per_channel, "<f4"),
            ("key_zero", per_channel, "<f4"),
            ("value_scale", whole[:3], "<f4"),
            ("value_zero", whole[:3], "<f4"),
            ("sink_keys", sinks, element),
            ("sink_values", sinks, element),
        ]
    sections, end = [], 0
    for name, shape, kind in parts:
        offset = -(-end // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        sections.append(Section(name, offset, shape, kind))
        end = offset + sections[-1].size_bytes
    return Layout(tuple(sections), end)


def layout_of(header: ChunkHeader) -> Layout:
    """Return the layout that a header describes. Raises InvalidRequest."""
    if header.format_version != FORMAT_VERSION:
        raise InvalidRequest(f"format_version is {header.format_version}; this version reads {FORMAT_VERSION}")
    return layout(Geometry.of(header), header.token_count, header.key_group_tokens, header.sink_tokens)


def new_header(geometry: Geometry, tokens: list[int], start_position: int) -> ChunkHeader:
    """Create the header of a new chunk, without hashes and checksum."""
    group = KEY_GROUP_TOKENS[geometry.bits]
    sinks = min(SINK_TOKENS, len(tokens)) if start_position == 0 and geometry.bits != 16 else 0
    return ChunkHeader(
        token_ids=tokens,
        token_count=len(tokens),
        start_position=start_position,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
        bits=geometry.bits,
        key_group_tokens=group,
        sink_tokens=sinks,
        payload_bytes=layout(geometry, len(tokens), group, sinks).size_bytes,
        format_version=FORMAT_VERSION,
    )
