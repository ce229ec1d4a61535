"""Counters: totals of what the store has done since its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvsidecar.cache.v1.cache_pb2 import StatsResponse

_MODULUS = 1 << 64
# What each field of a heartbeat counts.
_HEARTBEAT_FIELDS = ("matches", "requested_tokens", "prompts", "prompt_tokens", "cached_tokens", "pool_tokens")


@dataclass
class Counters:
    """Numbers that only grow, named as in StatsResponse. They never overflow; what is told of them is modulo 2^64."""

    matches: int = 0
    requested_tokens: int = 0
    matched_tokens: int = 0
    promoted_tokens: int = 0
    content_tokens: int = 0
    commits: int = 0
    arena_evictions: int = 0
    durable_evictions: int = 0
    expired_chunks: int = 0
    corrupt_chunks: int = 0
    failed_writes: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0

    def add_heartbeat(self, before: Sequence[int], totals: Sequence[int]) -> None:
        """Takes in by how much a heartbeat's totals grew, in the order of the message's fields; ``before`` is empty for
        the first."""
        for name, then, now in zip(_HEARTBEAT_FIELDS, before or (0,) * len(totals), totals, strict=True):
            setattr(self, name, getattr(self, name) + now - then)

    def write_to(self, out: StatsResponse) -> None:
        """Writes them into an answer."""
        for name, value in asdict(self).items():
            setattr(out, name, value % _MODULUS)
