"""Reuse by engine, namespace and tenant: loads, stores, misses by reason, prefill time saved.

Engines report their loads when they release leases, so all engines have the same metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsidecar.cache.v1 import cache_pb2 as pb

from cache_daemon.eviction.prefill_cost import MAX_TOKEN_SECONDS
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.sessions import Session

ENGINES = ("kvsidecar", "vllm", "sglang", "lmcache")
OTHER = "other"
COUNTERS = {
    "loads": "Loads of stored chunks that an engine completed",
    "loaded_tokens": "Tokens that engines loaded and did not compute",
    "loaded_bytes": "Payload bytes of these tokens",
    "load_seconds": "Time of lookups and copies of these loads",
    "saved_prefill_seconds": "Time that computing the loaded tokens took when they were stored",
    "stored_tokens": "Tokens in chunks that engines stored",
    "stored_bytes": "Payload bytes of these chunks",
}
MISSES = {
    "misses": "Lookups that found less than the whole prompt, by reason",
    "miss_tokens": "Prompt tokens that they did not find",
}
_NAMESPACE_DIGITS = 12
_MAX_NAMESPACES = 32


class ReuseLabels(NamedTuple):
    """Label values of a reuse metric; ``tenant`` is empty unless the operator enables that label."""

    engine: str
    namespace: str
    tenant: str


@dataclass
class ReuseCounts:
    """Totals of one engine, namespace and tenant, named as in ``COUNTERS`` and ``MISSES``."""

    loads: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    saved_prefill_seconds: float = 0.0
    stored_tokens: int = 0
    stored_bytes: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    miss_tokens: Counter[str] = field(default_factory=Counter)


class ReuseMetrics:
    """Reuse totals by label values, whose number is bounded. Updated on the event loop.

    Counts only sessions that share memory: reports of other callers cannot be trusted. ``tenant_name`` returns the name
    that an account has in the tenants file, or an empty string. The first ``max_tenants`` names get their own label.
    """

    def __init__(self, tenant_name: Callable[[bytes], str] = lambda _: "", max_tenants: int = 0) -> None:
        self.totals: dict[ReuseLabels, ReuseCounts] = {}
        self._engines: dict[bytes, str] = {}  # by namespace
        self._tenant_name, self._max_tenants = tenant_name, max_tenants
        self._tenants: set[str] = set()

    def attach(self, session: Session, engine: str) -> None:
        """Give a session's namespace its labels."""
        if session.shares_memory and (session.namespace in self._engines or len(self._engines) < _MAX_NAMESPACES):
            self._engines[session.namespace] = engine if engine in ENGINES else OTHER
            self._of(session.namespace, b"")

    def add_load(self, session: Session, chunks: Sequence[Chunk], report: pb.LoadReport) -> None:
        """Count a load that a session reports when it releases its lease on ``chunks``."""
        if not session.shares_memory or not chunks:
            return
        counts, all_tokens = self._of(session.namespace, chunks[0].tenant.id), sum(c.tokens for c in chunks)
        tokens = min(report.tokens, all_tokens)
        counts.loads += 1
        counts.loaded_tokens += tokens
        counts.loaded_bytes += min(report.payload_bytes, sum(c.size_bytes for c in chunks))
        counts.load_seconds += report.microseconds / 1e6
        seconds = sum(min(c.prefill_seconds, c.tokens * MAX_TOKEN_SECONDS) for c in chunks)
        counts.saved_prefill_seconds += seconds * tokens / all_tokens

    def add_stored(self, session: Session, account: bytes, tokens: int, size_bytes: int) -> None:
        """Count a stored chunk."""
        if session.shares_memory:
            counts = self._of(session.namespace, account)
            counts.stored_tokens += tokens
            counts.stored_bytes += size_bytes

    def add_miss(self, namespace: bytes, account: bytes, kind: str, tokens: int) -> None:
        """Count a lookup in a namespace that did not find ``tokens`` of its prompt."""
        if namespace in self._engines:
            counts = self._of(namespace, account)
            counts.misses[kind] += 1
            counts.miss_tokens[kind] += tokens

    def _of(self, namespace: bytes, account: bytes) -> ReuseCounts:
        engine = self._engines.get(namespace)
        labels = ReuseLabels(
            engine or OTHER, OTHER if engine is None else namespace.hex()[:_NAMESPACE_DIGITS], self._tenant(account)
        )
        return self.totals.setdefault(labels, ReuseCounts())

    def _tenant(self, account: bytes) -> str:
        if not self._max_tenants:
            return ""
        name = self._tenant_name(account)
        if name and len(self._tenants) < self._max_tenants:
            self._tenants.add(name)
        return name if name in self._tenants else OTHER
