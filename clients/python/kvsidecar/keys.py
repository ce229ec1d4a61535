"""Names of things in the cache: namespaces, prefix hashes, content hashes, checksums.

``protos/kvsidecar/cache/v1/chunk.proto`` is the specification; this is its Python.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

import xxhash

from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor

HASH_BYTES = 32
FORMAT_VERSION = 1
QUANTIZER_VERSION = 1


def canonical_encoding(descriptor: NamespaceDescriptor) -> bytes:
    """The descriptor as ``name=value\\n`` lines in the order of field numbers."""
    lines = []
    for field in sorted(descriptor.DESCRIPTOR.fields, key=lambda f: f.number):
        value = getattr(descriptor, field.name)
        if isinstance(value, bytes):
            text = value.hex()
        elif isinstance(value, str):
            text = value.replace("\\", "\\\\").replace("\n", "\\n")
        else:
            text = str(int(value))
        lines.append(f"{field.name}={text}\n")
    return "".join(lines).encode()


def namespace_id(descriptor: NamespaceDescriptor) -> bytes:
    """SHA-256 of everything that decides a chunk's bytes."""
    return hashlib.sha256(canonical_encoding(descriptor)).digest()


def tenant_root(namespace: bytes, tenant_salt: bytes) -> bytes:
    """Root of a tenant's chunks; tenants with different salts share nothing."""
    return hashlib.sha256(namespace + tenant_salt).digest() if tenant_salt else namespace


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as uint32 little-endian. Raises OverflowError for an id outside 32 bits."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def prefix_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a chunk together with everything before it."""
    return hashlib.sha256(parent + token_bytes(tokens)).digest()


def content_hash(root: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a chunk's tokens wherever they stand."""
    return hashlib.sha256(root + token_bytes(tokens)).digest()


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of a payload."""
    return xxhash.xxh3_64_intdigest(payload)
