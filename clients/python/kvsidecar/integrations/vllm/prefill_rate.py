"""What computing a prompt's token takes, as the scheduler sees it: beside whatever else its steps compute."""

from __future__ import annotations

_WEIGHT = 0.1
# Fewer tokens cost what a step costs, and say nothing about a token.
_MIN_TOKENS = 32
_MAX_SECONDS = 60.0


class PrefillRate:
    """A running mean. Any thread may read it."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        """Seconds that computing a token takes; 0 as long as nothing is known."""

    def record(self, tokens: int, seconds: float) -> None:
        """Records a prompt of which so many tokens were computed."""
        if tokens >= _MIN_TOKENS:
            spent = min(_MAX_SECONDS, seconds / tokens)
            self.seconds_per_token = (
                spent
                if not self.seconds_per_token
                else self.seconds_per_token + _WEIGHT * (spent - self.seconds_per_token)
            )
