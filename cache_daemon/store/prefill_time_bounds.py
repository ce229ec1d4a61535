"""Bounds of the prefill seconds that external callers claim for their chunks."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from math import inf
from statistics import median_low

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.auth.principal import Principal
from cache_daemon.eviction.prefill_cost import MAX_TOKEN_SECONDS
from cache_daemon.store.sessions import Session

# Latest claims of a voter, and voters, that count.
_MAX_CLAIMS, _MAX_VOTERS = 32, 256


class _Votes:
    """One vote per voter: the low median of its latest claims."""

    def __init__(self) -> None:
        self._claims: OrderedDict[Hashable, deque[float]] = OrderedDict()
        self._vote: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._vote)

    def record(self, voter: Hashable, claim: float) -> None:
        claims = self._claims.setdefault(voter, deque(maxlen=_MAX_CLAIMS))
        claims.append(claim)
        self._claims.move_to_end(voter)
        self._vote[voter] = median_low(claims)
        if len(self._claims) > _MAX_VOTERS:
            oldest, _ = self._claims.popitem(last=False)
            del self._vote[oldest]

    def of(self, voter: Hashable) -> float | None:
        return self._vote.get(voter)

    def median(self) -> float:
        """Return the low median of the votes; there must be one."""
        return median_low(self._vote.values())


class PrefillTimeBounds:
    """Bounds the claims of external callers, in seconds per byte, by the claims of others.

    Workers on the private socket and operators are trusted: the median of their claims in the namespace bounds external
    claims there. In other namespaces, which a caller may invent, the low median of their medians counts. While no
    trusted writer has claimed anything, the bound is the low median of external callers with one vote each, so it does
    not depend on how much a caller inserts. The store's only writer is bounded by ``MAX_TOKEN_SECONDS`` alone: it
    competes with its own chunks only, and no model takes longer.
    """

    def __init__(self) -> None:
        self._trusted, self._external = _Votes(), _Votes()  # by namespace; by principal

    def clamp(self, session: Session, header: ChunkHeader) -> float:
        """Return the seconds to believe of a chunk that a session commits, and learn from them. 0 is unknown."""
        if not header.prefill_seconds:
            return 0.0
        size_bytes = max(header.payload_bytes, 1)
        seconds = min(header.prefill_seconds, header.token_count * MAX_TOKEN_SECONDS)
        owner, namespace = session.owner, session.namespace
        if session.shares_memory or (isinstance(owner, Principal) and owner.operator):
            self._trusted.record(namespace, seconds / size_bytes)
            return seconds
        self._external.record(owner, seconds / size_bytes)
        return min(seconds, self._bound(namespace) * size_bytes)

    def _bound(self, namespace: bytes) -> float:
        if self._trusted:
            known = self._trusted.of(namespace)
            return self._trusted.median() if known is None else known
        return self._external.median() if len(self._external) > 1 else inf
