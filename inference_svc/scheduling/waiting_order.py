"""Order of the waiting queue. Pure: numbers in, decisions out.

The sequence with the longest known prefix is first, with ageing: a second of waiting counts as
``AGE_TOKENS_PER_SECOND`` known tokens. A preempted sequence is admitted before all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGE_TOKENS_PER_SECOND = 2000.0
# Maximum time for which a sequence is held back until another sequence has computed their common prefix.
MAX_HOLD_SECONDS = 60.0


@dataclass(frozen=True)
class Candidate:
    """A waiting sequence, in numbers.

    ``known``: leading tokens that need no computation. ``held_back``: a running sequence will soon share more tokens.
    """

    waited_seconds: float
    known: int = 0
    held_back: bool = False
    preempted: bool = False


def select_waiting(candidates: Sequence[Candidate]) -> int | None:
    """Returns the index of the sequence to admit; None if all are held back."""
    best, chosen = -1.0, None
    for i, c in enumerate(candidates):
        if c.preempted:
            return i
        if c.held_back and c.waited_seconds < MAX_HOLD_SECONDS:
            continue
        score = c.known + c.waited_seconds * AGE_TOKENS_PER_SECOND
        if score > best:
            best, chosen = score, i
    return chosen
