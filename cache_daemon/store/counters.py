"""Counters: totals of the store since its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvsidecar.cache.v1.cache_pb2 import StatsResponse

_MODULUS = 1 << 64
# Counters of a heartbeat, in the order of the message's fields.
_HEARTBEAT_FIELDS = ("matches", "requested_tokens", "prompts", "prompt_tokens", "cached_tokens", "pool_tokens")


@dataclass
class Counters:
    """Monotonic totals, named as in StatsResponse.

    The totals do not overflow here; StatsResponse contains them modulo 2^64.
    """

    matches: int = 0
    requested_tokens: int = 0
    matched_tokens: int = 0
    promoted_tokens: int = 0
    content_tokens: int = 0
    commits: int = 0
    arena_evictions: int = 0
    gpu_tokens: int = 0
    gpu_copies: int = 0
    gpu_evictions: int = 0
    durable_evictions: int = 0
    expired_chunks: int = 0
    corrupt_chunks: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0

    def add_heartbeat(self, before: Sequence[int], totals: Sequence[int]) -> None:
        """Add the growth of a session's totals; ``before`` is empty for its first heartbeat."""
        for name, then, now in zip(_HEARTBEAT_FIELDS, before or (0,) * len(totals), totals, strict=True):
            setattr(self, name, getattr(self, name) + now - then)

    def write_to(self, out: StatsResponse) -> None:
        """Fill the fields of a StatsResponse."""
        for name, value in asdict(self).items():
            setattr(out, name, value % _MODULUS)
