"""Sizes, tenants and contents of a simulation, so small that the store reaches every limit often."""

from __future__ import annotations

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32, NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry

from cache_daemon.auth.tenant_limits import Priority, TenantLimits

PAGE = 4096
# A token takes a page, so that chunks differ in size and the arena fragments.
GEOMETRY = Geometry(2, 4, 64, DATA_TYPE_FLOAT32, 16)
ARENA_BYTES, GPU_BYTES, STAGING_BYTES, DURABLE_BYTES = 24 * PAGE, 6 * PAGE, 16 * PAGE, 40 * PAGE
INDEX_BYTES = 36 * (8 << 10)
LIMITS = {
    b"": TenantLimits(),
    b"quota": TenantLimits(arena_bytes=8 * PAGE, store_bytes=12 * PAGE, priority=Priority.LOW),
    b"brief": TenantLimits(ttl_seconds=100.0, entries=3),
    b"high": TenantLimits(priority=Priority.HIGH, pin_bytes=4 * PAGE),
}
BY_TENANT = {keys.tenant_id(salt): limits for salt, limits in LIMITS.items()}
_NAMESPACE = NamespaceDescriptor(
    model_fingerprint=b"m" * 32, architecture="Test", layers=2, kv_heads=4, head_dim=64, dtype=DATA_TYPE_FLOAT32,
    format_version=keys.FORMAT_VERSION, bits=16, tensor_parallel_size=1,
)  # fmt: skip
_ROOTS = {salt: keys.tenant_root(keys.namespace_id(_NAMESPACE), salt) for salt in LIMITS}


def namespace() -> NamespaceDescriptor:
    return _NAMESPACE


def root_of(salt: bytes) -> bytes:
    return _ROOTS[salt]


def payload_of(key: bytes, size: int) -> bytes:
    """Return a payload that depends on its chunk and the chunk's prefix."""
    return (key * (size // len(key) + 1))[:size]
