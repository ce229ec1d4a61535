"""Cache hints of one request: TTLs of its prompt's parts, and its session."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.cache.v1 import cache_pb2 as pb


@dataclass(frozen=True)
class CacheHints:
    """TTLs of a prompt's chunks, and the session that they belong to (empty: none).

    ``parts`` are ``(end in tokens, TTL in seconds)`` with rising ends; ``ttl_seconds`` applies behind the last of them.
    A TTL of 0 is no expiry.
    """

    ttl_seconds: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    session: str = ""

    def add_to(self, request: pb.MatchRequest | pb.ReserveRequest) -> None:
        """Set the fields of a request to the daemon."""
        request.ttl_seconds, request.group = self.ttl_seconds, self.session
        request.parts.extend(pb.PartTtl(end=end, ttl_seconds=ttl) for end, ttl in self.parts)


NO_HINTS = CacheHints()
