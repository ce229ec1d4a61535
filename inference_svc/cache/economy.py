"""Decides whether loading pays: measured seconds per token of loading against prefill."""

from __future__ import annotations

_WEIGHT = 0.1
_RETRY_EVERY = 16


class Economy:
    """Running means. Loading is skipped while it is slower than computing, but tried again now and then."""

    def __init__(self) -> None:
        self._load: float | None = None
        self._prefill: float | None = None
        self._skipped = 0

    def loaded(self, tokens: int, seconds: float) -> None:
        if tokens:
            self._load = _mean(self._load, seconds / tokens)

    def prefilled(self, tokens: int, seconds: float) -> None:
        if tokens:
            self._prefill = _mean(self._prefill, seconds / tokens)

    def worth_loading(self) -> bool:
        if self._load is None or self._prefill is None or self._load <= self._prefill:
            return True
        self._skipped += 1
        return self._skipped % _RETRY_EVERY == 0


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
