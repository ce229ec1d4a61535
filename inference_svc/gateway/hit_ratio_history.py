"""Hit ratio of the last ten minutes, from the workers' counters."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from kvsidecar.inference.v1 import inference_pb2 as pb

STEP_SECONDS, _STEPS = 5, 120


@dataclass
class _Step:
    """Prompt tokens and cached tokens of one time step, without requests that skip the cache."""

    number: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


class HitRatioHistory:
    """Increments of the workers' counters, summed per time step, for the last ten minutes."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_STEPS)
        self._seen: dict[str, tuple[int, int]] = {}

    def observe(self, worker: str, stats: pb.GetStatsResponse, now: float) -> None:
        """Record a worker's counters; ``now`` is in monotonic seconds.

        If a counter has decreased, the worker was restarted, and the counter began again at 0. The first observation of
        a worker adds nothing.
        """
        prompt, cached = stats.prompt_tokens - stats.skipping_tokens, stats.cached_tokens
        old = self._seen.get(worker, (prompt, cached))
        if prompt < old[0]:
            old = (0, 0)
        self._seen[worker] = (prompt, cached)
        number = int(now // STEP_SECONDS)
        if not self._steps or self._steps[-1].number < number:
            first = self._steps[-1].number + 1 if self._steps else number
            self._steps.extend(_Step(n) for n in range(max(first, number - _STEPS + 1), number + 1))
        self._steps[-1].prompt_tokens += prompt - old[0]
        self._steps[-1].cached_tokens += cached - old[1]

    def as_dict(self) -> dict[str, Any]:
        """Return the steps, oldest first."""
        return {
            "step_seconds": STEP_SECONDS,
            "prompt_tokens": [s.prompt_tokens for s in self._steps],
            "cached_tokens": [s.cached_tokens for s in self._steps],
        }
