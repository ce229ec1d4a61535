"""Decides whether loading pays: measured times of loading against measured times of prefill."""

from __future__ import annotations

_EWMA_WEIGHT = 0.1
_RETRY_EVERY = 16
# Loads of fewer tokens say what a load costs at least, longer ones what a token costs.
_MIN_PER_TOKEN_LOAD = 256
# A prefill of fewer tokens costs what a forward costs, and says nothing about a token.
_MIN_PREFILL = 32
# A wrong decision must cost this much before it is worth skipping the cache.
_MARGIN_SECONDS = 0.01
# A load that takes so much longer than computing is given up, but none before this.
_TIMEOUT_FACTOR, _MIN_TIMEOUT_SECONDS = 2.0, 1.0


class LoadCostModel:
    """Running means of both. Loading is skipped while it would clearly lose, but tried again now and then."""

    def __init__(self) -> None:
        self._load_fixed: float | None = None
        self._load_per_token: float | None = None
        self._prefill_per_token: float | None = None
        self._skipped = 0
        self._last_was_slow = False

    def record_load(self, tokens: int, seconds: float) -> None:
        """Records a load. Of one that was tried again although loads had not paid, what it found now is what counts. A
        disk may have held up a single one: what was slower than computing counts if the load before it was, too."""
        if self._prefill_per_token is None or not tokens:
            return
        stale = not self.load_pays(tokens)
        slow = seconds > self._break_even_seconds(tokens)
        alone = slow and not self._last_was_slow
        self._last_was_slow = slow
        if alone and not stale:
            return
        if tokens < _MIN_PER_TOKEN_LOAD:
            self._load_fixed = _moving_average(None if stale else self._load_fixed, seconds)
        else:
            each = max(0.0, seconds - (self._load_fixed or 0.0)) / tokens
            self._load_per_token = _moving_average(None if stale else self._load_per_token, each)

    def reset_loads(self) -> None:
        """Another daemon: what loading took from the last one says nothing about it."""
        self._load_fixed = self._load_per_token = None
        self._last_was_slow = False

    def record_timeout(self, tokens: int, seconds: float) -> None:
        """Records a load that was not complete after so long: it takes at least that."""
        if 0 < tokens < _MIN_PER_TOKEN_LOAD:
            self._load_fixed = max(self._load_fixed or 0.0, seconds)
        elif tokens:
            self._load_per_token = max(self._load_per_token or 0.0, seconds / tokens)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Records a prefill."""
        if tokens >= _MIN_PREFILL:
            self._prefill_per_token = _moving_average(self._prefill_per_token, seconds / tokens)

    def seconds_per_token(self, tokens: int, seconds: float) -> float:
        """What a token costs that was computed among so many; of a few behind a hit, what others have cost, or at most
        as much as if there had been enough of them to tell."""
        if tokens < _MIN_PREFILL and self._prefill_per_token is not None:
            return self._prefill_per_token
        return seconds / max(tokens, _MIN_PREFILL)

    @property
    def prefill_seconds_per_token(self) -> float:
        """Seconds that computing a token takes; 0 as long as nothing is known."""
        return self._prefill_per_token or 0.0

    def load_timeout(self, tokens: int) -> float:
        """Seconds after which loading so much is given up for computing it."""
        if self._prefill_per_token is None:
            return float("inf")
        return max(_MIN_TIMEOUT_SECONDS, _TIMEOUT_FACTOR * self._prefill_per_token * tokens)

    def load_pays(self, tokens: int) -> bool:
        """Whether loading so much is not clearly slower than computing it, as far as is known."""
        if self._prefill_per_token is None:
            return True
        return self.load_seconds(tokens) <= self._break_even_seconds(tokens)

    def load_seconds(self, tokens: int) -> float:
        """Seconds that loading so much is expected to take; 0 as long as nothing is known."""
        return (self._load_fixed or 0.0) + (self._load_per_token or 0.0) * tokens

    def should_load(self, tokens: int) -> bool:
        """Whether to look a prompt of this length up."""
        if self.load_pays(tokens):
            return True
        self._skipped += 1
        return self._skipped % _RETRY_EVERY == 0

    def worth_reusing(self, repair_cost: float) -> bool:
        """Whether tokens that were read elsewhere are cheaper to load and repair than to compute. ``repair_cost`` is
        the share of a prefill that the repair takes."""
        if self._prefill_per_token is None:
            return repair_cost < 1.0
        return (self._load_per_token or 0.0) + repair_cost * self._prefill_per_token < self._prefill_per_token

    def _break_even_seconds(self, tokens: int) -> float:
        """Seconds that loading so much may take before it is clearly slower than computing it."""
        return self.prefill_seconds_per_token * tokens + _MARGIN_SECONDS


def _moving_average(old: float | None, new: float) -> float:
    return new if old is None else old + _EWMA_WEIGHT * (new - old)
