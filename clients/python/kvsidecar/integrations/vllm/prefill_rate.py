"""Running mean of the prefill time per token.

The scheduler measures the time, so it includes the other requests in the same batches.
"""

from __future__ import annotations

_WEIGHT = 0.1
# For fewer tokens, the measured time is mostly the fixed cost of a step, so it says little about the cost per token.
MIN_PREFILL_TOKENS = 32
MAX_SECONDS_PER_TOKEN = 60.0


class PrefillRate:
    """Running mean of the prefill time per token, in seconds. Any thread may read it."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        """Prefill time of a token; 0 while unknown."""

    def record(self, tokens: int, seconds: float) -> float:
        """Record a prompt of which ``tokens`` were computed in ``seconds``; return its prefill time per token.

        If the tokens are too few to measure, it returns the mean of earlier prompts.
        """
        if tokens < MIN_PREFILL_TOKENS:
            return self.seconds_per_token
        spent = min(MAX_SECONDS_PER_TOKEN, seconds / tokens)
        self.seconds_per_token = (
            spent if not self.seconds_per_token else self.seconds_per_token + _WEIGHT * (spent - self.seconds_per_token)
        )
        return spent
