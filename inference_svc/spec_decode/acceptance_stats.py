"""How often guesses are right: of each sign in all, and in one answer."""

from __future__ import annotations

from collections.abc import Sequence

# A prior, and what all answers say, count as much as so many guesses; older ones fade.
_PRIOR_WEIGHT, _COMMON_WEIGHT = 8.0, 4.0
_COMMON_FADE, _OWN_FADE = 0.998, 0.96


class AcceptanceCounts:
    """Guesses and right ones, for each sign."""

    def __init__(self, seen: Sequence[float], right: Sequence[float], fade: float) -> None:
        self.seen, self.right, self._fade = list(seen), list(right), fade

    def add(self, sign: int, right: bool) -> None:
        self.seen[sign] = self.seen[sign] * self._fade + 1
        self.right[sign] = self.right[sign] * self._fade + right


class AcceptanceStats:
    """What a proposer's signs are worth."""

    def __init__(self, priors: Sequence[float]) -> None:
        seen = [_PRIOR_WEIGHT] * len(priors)
        self._common = AcceptanceCounts(seen, [p * _PRIOR_WEIGHT for p in priors], _COMMON_FADE)

    def own(self) -> AcceptanceCounts:
        """For one answer."""
        zeros = [0.0] * len(self._common.seen)
        return AcceptanceCounts(zeros, zeros, _OWN_FADE)

    def chance(self, own: AcceptanceCounts, sign: int) -> float:
        """That a guess of a sign is right, if those before it are."""
        common = self._common.right[sign] / self._common.seen[sign]
        return (own.right[sign] + _COMMON_WEIGHT * common) / (own.seen[sign] + _COMMON_WEIGHT)

    def learn(self, own: AcceptanceCounts, sign: int, right: bool) -> None:
        own.add(sign, right)
        self._common.add(sign, right)
