"""Cache keys: namespace ids, tenant roots, prefix hashes, content hashes, checksums.

``protos/kvsidecar/cache/v1/chunk.proto`` is the specification; ``docs/protocol.md`` has test vectors. Every hash input
begins with its purpose and delimits its parts, so that no value of a caller (a salt, tokens) can imitate another hash's
input.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import xxhash

from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor

HASH_BYTES = 32
FORMAT_VERSION = 2
QUANTIZER_VERSION = 1
MAX_SALT_BYTES = 256
# UTF-8 text never contains the byte 0xff, so no client can choose a text that equals such a salt.
_LONG_SALT = b"\xffkvsidecar/salt/1"
TOKEN_BYTES = 4

# No purpose is a prefix of another purpose, so the end of a purpose is unambiguous.
_NAMESPACE, _ROOT, _TENANT = b"kvsidecar/2/namespace", b"kvsidecar/2/root", b"kvsidecar/2/tenant"
_PREFIX, _CONTENT, _HEAD = b"kvsidecar/2/prefix", b"kvsidecar/2/content", b"kvsidecar/2/head"
_LENGTH = struct.Struct("<I")

Tokens = Sequence[int] | bytes
"""Token ids, or their encoding as uint32 little-endian."""


def canonical_encoding(descriptor: NamespaceDescriptor) -> bytes:
    """Encode the descriptor as ``name=value\\n`` lines in the order of field numbers."""
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
    """Return the id of a namespace: everything that determines a chunk's bytes."""
    return _hash(_NAMESPACE, _sized(canonical_encoding(descriptor)))


def tenant_root(namespace: bytes, tenant_salt: bytes) -> bytes:
    """Return the root of a tenant's chunks in a namespace; tenants with different salts share nothing."""
    return _hash(_ROOT, namespace, _sized(tenant_salt))


def text_salt(text: str) -> bytes:
    """Return the tenant salt of an engine's ``cache_salt``: its bytes in UTF-8, or a hash if they are too many."""
    salt = text.encode("utf-8", "surrogatepass")
    return salt if len(salt) <= MAX_SALT_BYTES else _LONG_SALT + hashlib.sha256(salt).digest()


def tenant_id(tenant_salt: bytes) -> bytes:
    """Return a tenant's id, which is the same in all namespaces; quotas apply per id."""
    return _hash(_TENANT, _sized(tenant_salt))


def token_bytes(tokens: Tokens) -> bytes:
    """Encode token ids as uint32 little-endian. Raises OverflowError for an id outside 32 bits."""
    if isinstance(tokens, bytes):
        return tokens
    import numpy as np  # lazy: the command line hashes nothing, and starts much faster without NumPy

    return np.array(tokens, "<u4").tobytes()


def prefix_hash(parent: bytes, tokens: Tokens) -> bytes:
    """Return the id of a chunk together with its whole prefix."""
    return _hash_tokens(_PREFIX, parent, tokens)


def content_hash(root: bytes, tokens: Tokens) -> bytes:
    """Return the id of a chunk's tokens, independent of their position."""
    return _hash_tokens(_CONTENT, root, tokens)


def head_hash(root: bytes, tokens: Tokens) -> bytes:
    """Return the key of a prompt's first tokens in the index summary."""
    return _hash_tokens(_HEAD, root, tokens)


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """Return XXH3-64 of a payload. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(payload)


def _hash_tokens(purpose: bytes, parent: bytes, tokens: Tokens) -> bytes:
    packed = token_bytes(tokens)
    return _hash(purpose, parent, _LENGTH.pack(len(packed) // TOKEN_BYTES), packed)


def _sized(part: bytes) -> bytes:
    return _LENGTH.pack(len(part)) + part


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
