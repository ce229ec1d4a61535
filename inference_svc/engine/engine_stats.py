"""Engine statistics and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.engine.miss_counts import MissCounts


@dataclass
class EngineStats:
    """Counters since the start."""

    requests: int = 0
    bypassing_requests: int = 0  # requests that may not read the cache
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    bypassing_tokens: int = 0  # prompt_tokens of bypassing requests
    cached_tokens: int = 0
    pool_hit_tokens: int = 0
    approximate_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    corrupt_hits: int = 0  # reused prefixes with NaN or infinity, computed again
    overflow_admissions: int = 0  # sequences admitted to the overflow
    steps: int = 0
    misses: MissCounts = field(default_factory=MissCounts)

    @property
    def cacheable_tokens(self) -> int:
        """Denominator of the hit ratio: prompt tokens of requests that may use the cache."""
        return self.prompt_tokens - self.bypassing_tokens


@dataclass(frozen=True)
class EngineLimits:
    """Limits of batch, queue, prefix cache and speculation."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_queue: int = 1024
    prefix_cache_sequences: int = 64
    num_speculative_tokens: int = 16  # maximum depth of a draft tree
    num_speculative_branches: int = 2  # maximum paths of a draft tree
    max_prefill_step_seconds: float = 0.25  # limit of a step with prompt rows beside decoding sequences; 0: no limit
