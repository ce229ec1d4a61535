"""Cache hints of one request about the chunks that it uses and stores."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_hints import KvHints
from kvsidecar.retained_prefixes import RetainedPrefixes


@dataclass(frozen=True)
class CacheHints:
    """TTL (0: no expiry), retained prefixes, session (empty: none) and priority of a request's chunks.

    ``fetch`` requests stored chunks from the remote tier even if computing them seems faster.
    """

    ttl_seconds: int = 0
    retained: RetainedPrefixes = ()
    session: str = ""
    low_priority: bool = False
    fetch: bool = False

    @classmethod
    def of_kv_hints(cls, hints: KvHints) -> CacheHints:
        """Convert the hints of a KV hint envelope, which vLLM or SGLang passes with a request."""
        return cls(retained=hints.retained, low_priority=hints.low_priority, fetch=hints.fetch)

    def add_to(self, request: pb.MatchRequest | pb.ReserveRequest) -> None:
        """Set the fields of a request to the daemon."""
        request.ttl_seconds, request.group, request.low_priority = self.ttl_seconds, self.session, self.low_priority
        request.retained.extend(pb.RetainedPrefix(end=end, retain_seconds=seconds) for end, seconds in self.retained)


NO_HINTS = CacheHints()
