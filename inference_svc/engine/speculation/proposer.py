"""What guesses tokens, and what a guess is."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

from inference_svc.engine.sequence import Sequence

ROOT = -1


@dataclass(frozen=True)
class Draft:
    """A tree of tokens that may follow a sequence. ``parents[i] < i`` is the place of the token before ``tokens[i]``,
    ROOT for the sequence's last one; ``signs[i]``, below the proposer's number of signs, says how sure it is.

    The likeliest child comes first: ``path`` is the chain that is verified. Attention takes no ancestor mask (it sees
    what lies before a row's position), so other branches wait for kernels that do.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    signs: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: abc.Sequence[int], signs: abc.Sequence[int]) -> Draft:
        """A tree without branches."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(signs))

    def path(self) -> tuple[list[int], list[int]]:
        """The tokens and signs from the root along first children."""
        at, tokens, signs = ROOT, list[int](), list[int]()
        for i, parent in enumerate(self.parents):
            if parent == at:
                tokens.append(self.tokens[i])
                signs.append(self.signs[i])
                at = i
        return tokens, signs


@dataclass(frozen=True)
class Wish:
    """A sequence that tokens are guessed for, ``most`` of them."""

    sequence: Sequence
    most: int


class Proposer(Protocol):
    """Guesses what comes next. Only the engine's thread uses it. What it keeps of a sequence goes with ``forget``;
    a sequence that was forgotten may be asked for again."""

    @property
    def priors(self) -> tuple[float, ...]:
        """For each sign the chance that such a token is right, until it has been measured."""
        ...

    @property
    def step_seconds(self) -> float:
        """What one guess more for all that are asked for takes; 0 for next to nothing, and while it is not known."""
        ...

    def propose(self, wishes: abc.Sequence[Wish]) -> list[Draft]:
        """A guess for each, empty for none."""
        ...

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of the last guess ``drafted`` tokens were verified, and the first ``accepted`` are part of the answer now."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """The answer is complete, and may be learnt from. ``forget`` follows."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept of a sequence. Without effect for one that is not known."""
        ...
