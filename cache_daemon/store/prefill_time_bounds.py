"""Bounds of the prefill times that external callers report for their chunks."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from math import inf
from statistics import median_low

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.auth.principal import Principal
from cache_daemon.eviction.prefill_cost import MAX_TOKEN_SECONDS
from cache_daemon.store.sessions import Session

# Number of latest claims per voter, and number of voters, that count.
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
    """Bounds prefill times claimed by external callers, in seconds per byte.

    Workers on the private socket and operators are trusted: the median of their claims in a namespace bounds external
    claims in that namespace. In a namespace without trusted claims, which a caller may have invented, the bound is the
    low median of the medians of all namespaces with trusted claims. While there are no trusted claims at all, the bound
    is the low median of the external callers' medians: one vote per caller, so inserting more chunks gives no more
    weight. If only one caller writes to the store, only ``MAX_TOKEN_SECONDS`` bounds its claims: its chunks compete
    only with each other, and no model takes longer.
    """

    def __init__(self) -> None:
        self._trusted, self._external = _Votes(), _Votes()  # voters: namespaces; principals

    def clamp(self, session: Session, header: ChunkHeader) -> float:
        """Return the bounded prefill seconds of a chunk that a session commits; 0 is unknown. Records the claim."""
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
