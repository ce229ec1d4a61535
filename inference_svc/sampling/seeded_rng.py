"""Random numbers of one request, by seed and position."""

from __future__ import annotations

import secrets

_GOLDEN, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
# Random numbers per position of the answer.
_TRIES = 64


class SeededRng:
    """Counter-based random numbers; without a given seed, the seed is random.

    A random number is a function of the seed, the position in the answer and the attempt. So results with a seed do not
    depend on the rest of the batch or on preemptions. The function is SplitMix64 (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", 2014) of a counter.
    """

    def __init__(self, seed: int | None) -> None:
        self._start = _mix(secrets.randbits(64) if seed is None else seed & _WORD)

    def uniform(self, position: int, attempt: int) -> float:
        """Returns the random number in [0, 1) for an attempt at a position of the answer."""
        place = position * _TRIES + attempt % _TRIES + 1
        return (_mix(self._start + place * _GOLDEN) >> 11) * 2.0**-53


def _mix(word: int) -> int:
    """Computes SplitMix64's finalizer."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
