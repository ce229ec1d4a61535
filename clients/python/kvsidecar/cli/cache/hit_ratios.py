"""Hit ratios by tier: one definition for all commands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvsidecar.cache.v1 import cache_pb2 as pb


@dataclass(frozen=True)
class HitRatios:
    """Hit ratios: shares of the tokens of all prompts that may use the cache.

    Ratios are None before the first such prompt. ``total`` is the share that the usage of answers counts as cached, so
    it agrees with the gateway's numbers. The other fields split ``total`` by the source of the tokens: a worker's own
    ``pool``, the daemon's ``arena``, the durable tier (``disk``) and the ``remote`` tier.
    """

    total: float | None = None
    pool: float | None = None
    arena: float | None = None
    disk: float | None = None
    remote: float | None = None

    @staticmethod
    def of(stats: Any, before: Any = None) -> HitRatios:
        """Compute ratios since the daemon's start, or since an earlier StatsResponse.

        ``before`` must have the same epoch.
        """
        before = before if before is not None else pb.StatsResponse()
        prompt = stats.prompt_tokens - before.prompt_tokens
        if prompt <= 0:
            return HitRatios()
        cached = stats.cached_tokens - before.cached_tokens
        pool = min(cached, stats.pool_tokens - before.pool_tokens)
        # Workers report with heartbeats, later than the daemon counts. So the workers' total limits the daemon's
        # counts.
        disk = min(cached - pool, stats.promoted_tokens - before.promoted_tokens)
        remote = min(cached - pool - disk, stats.remote_tokens - before.remote_tokens)
        arena = cached - pool - disk - remote
        return HitRatios(cached / prompt, pool / prompt, arena / prompt, disk / prompt, remote / prompt)

    def as_dict(self) -> dict[str, float | None]:
        return {name: value if value is None else round(value, 6) for name, value in asdict(self).items()}
