"""Whether a header that comes from elsewhere, with its tokens, tells the truth about itself."""

from __future__ import annotations

import math

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from kvsidecar.errors import KVSidecarError


def hashes_match(header: ChunkHeader) -> bool:
    """Whether its hashes are those of its tokens."""
    tokens = header.token_ids[:]
    return (
        keys.prefix_hash(header.parent_prefix_hash, tokens) == header.prefix_hash
        and keys.content_hash(header.root, tokens) == header.content_hash
    )


def is_valid_duration(seconds: float) -> bool:
    """Whether that can be what computing a chunk took: a number, from 0."""
    return 0 <= seconds < math.inf


def layout_payload_bytes(header: ChunkHeader) -> int:
    """The size of a payload of its layout. Raises ValueError for one that cannot be."""
    try:
        return layout_of(header).size_bytes
    except (KVSidecarError, ValueError, KeyError, ArithmeticError) as error:
        raise ValueError(str(error)) from error
