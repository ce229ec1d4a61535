"""What computing a prompt's token takes, as the scheduler sees it: beside whatever else its steps compute."""

from __future__ import annotations

_WEIGHT = 0.1
# Fewer tokens cost what a step costs, and say nothing about a token.
_LEAST_TOKENS = 32
_MOST_SECONDS = 60.0


class Pace:
    """A running mean. Any thread may read it."""

    def __init__(self) -> None:
        self.price = 0.0
        """Seconds that computing a token takes; 0 as long as nothing is known."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Records a prompt of which so many tokens were computed."""
        if tokens >= _LEAST_TOKENS:
            spent = min(_MOST_SECONDS, seconds / tokens)
            self.price = spent if not self.price else self.price + _WEIGHT * (spent - self.price)
