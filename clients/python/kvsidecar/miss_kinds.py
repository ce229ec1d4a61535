"""Kinds of misses as text, for answers, metrics and logs."""

from __future__ import annotations

from kvsidecar.cache.v1.cache_pb2 import MissKind

MISS_UNKNOWN = "unknown"


def miss_kind_name(kind: MissKind.ValueType) -> str:
    """Return the name of a kind, such as ``never_seen``."""
    return MissKind.Name(kind).removeprefix("MISS_KIND_").lower().replace("unspecified", MISS_UNKNOWN)
