"""Load cost model: compares measured load times with measured prefill times."""

from __future__ import annotations

_EWMA_WEIGHT = 0.1
_RETRY_EVERY = 16
# A load of fewer tokens measures the fixed cost of a load; a load of more tokens measures the cost per token.
_MIN_PER_TOKEN_LOAD = 256
# A prefill of fewer tokens takes as long as any step, so it does not measure the cost per token.
_MIN_PREFILL = 32
# The cache is bypassed only if loading takes longer than prefill by more than this margin.
_MARGIN_SECONDS = 0.01
# A load is abandoned after this multiple of the prefill time, but not before the minimum.
_TIMEOUT_FACTOR, _MIN_TIMEOUT_SECONDS = 2.0, 1.0


class LoadCostModel:
    """Moving averages of load and prefill times.

    While loading is clearly slower than prefill, the model advises against it, except for one retry in ``_RETRY_EVERY``
    lookups.
    """

    def __init__(self) -> None:
        self._load_fixed: float | None = None
        self._load_per_token: float | None = None
        self._prefill_per_token: float | None = None
        self._skipped = 0
        self._last_was_slow = False

    def record_load(self, tokens: int, seconds: float) -> None:
        """Record a load.

        A load that was tried against the model's advice replaces the moving average instead of updating it.

        Otherwise a load that is slower than prefill counts only if the previous load was slow, too: a single slow load
        may be an outlier of the disk.
        """
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
        """Forget the load times, which were measured with another daemon process."""
        self._load_fixed = self._load_per_token = None
        self._last_was_slow = False

    def record_timeout(self, tokens: int, seconds: float) -> None:
        """Record ``seconds`` as a lower bound of the cost of a load that timed out."""
        if 0 < tokens < _MIN_PER_TOKEN_LOAD:
            self._load_fixed = max(self._load_fixed or 0.0, seconds)
        elif tokens:
            self._load_per_token = max(self._load_per_token or 0.0, seconds / tokens)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record a prefill; short ones are ignored."""
        if tokens >= _MIN_PREFILL:
            self._prefill_per_token = _moving_average(self._prefill_per_token, seconds / tokens)

    def seconds_per_token(self, tokens: int, seconds: float) -> float:
        """Prefill seconds per token, from a prefill of ``tokens`` tokens in ``seconds``.

        If the tokens are too few to measure, it returns the average of other prefills. Without other prefills, it
        returns ``seconds`` divided by ``_MIN_PREFILL``.
        """
        if tokens < _MIN_PREFILL and self._prefill_per_token is not None:
            return self._prefill_per_token
        return seconds / max(tokens, _MIN_PREFILL)

    @property
    def prefill_seconds_per_token(self) -> float:
        """Average prefill seconds per token; 0 before the first measurement."""
        return self._prefill_per_token or 0.0

    def load_timeout(self, tokens: int) -> float:
        """Seconds after which a load of ``tokens`` tokens is abandoned."""
        if self._prefill_per_token is None:
            return float("inf")
        return max(_MIN_TIMEOUT_SECONDS, _TIMEOUT_FACTOR * self._prefill_per_token * tokens)

    def load_pays(self, tokens: int) -> bool:
        """False if loading ``tokens`` tokens takes clearly longer than their prefill."""
        if self._prefill_per_token is None:
            return True
        return self.load_seconds(tokens) <= self._break_even_seconds(tokens)

    def load_seconds(self, tokens: int) -> float:
        """Expected seconds to load ``tokens`` tokens; 0 before the first measurement."""
        return (self._load_fixed or 0.0) + (self._load_per_token or 0.0) * tokens

    def should_load(self, tokens: int) -> bool:
        """True if a prompt with ``tokens`` uncached tokens should be looked up. Counts retries."""
        if self.load_pays(tokens):
            return True
        self._skipped += 1
        return self._skipped % _RETRY_EVERY == 0

    def worth_reusing(self, recompute_cost: float) -> bool:
        """True if loading and recomputing relocated tokens is cheaper than prefill.

        ``recompute_cost`` is the cost of selective recompute as a share of a prefill.
        """
        if self._prefill_per_token is None:
            return recompute_cost < 1.0
        return (self._load_per_token or 0.0) + recompute_cost * self._prefill_per_token < self._prefill_per_token

    def _break_even_seconds(self, tokens: int) -> float:
        """Maximum load time of ``tokens`` tokens that is not clearly slower than prefill."""
        return self.prefill_seconds_per_token * tokens + _MARGIN_SECONDS


def _moving_average(old: float | None, new: float) -> float:
    return new if old is None else old + _EWMA_WEIGHT * (new - old)
