"""What guesses tokens, and what a guess is."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

from inference_svc.sequence.sequence import Sequence

ROOT = -1


@dataclass(frozen=True)
class Draft:
    """A tree of tokens that may follow a sequence. ``parents[i] < i`` is the place of the token before ``tokens[i]``,
    ROOT for the sequence's last one; ``signs[i]``, below the proposer's number of buckets, says how sure it is.

    The likeliest child comes first.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: abc.Sequence[int], buckets: abc.Sequence[int]) -> Draft:
        """A tree without branches."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(buckets))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """The most tokens that may be right."""
        depths = list[int]()
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    def children(self, place: int) -> list[int]:
        """The places of what may come next behind one, or behind ROOT."""
        return [i for i, parent in enumerate(self.parents) if parent == place]

    def paths(self) -> list[list[int]]:
        """The places of all tokens, in paths that go on along first children: the first one from the root, and each of
        the others, which come later than what they go on from, from a later child on."""
        found, ends = list[list[int]](), dict[int, list[int]]()
        for i, parent in enumerate(self.parents):
            path = ends.pop(parent, None)
            if path is None:
                path = list[int]()
                found.append(path)
            path.append(i)
            ends[i] = path
        return found

    def ancestors(self, place: int) -> list[int]:
        """The places before one, from ROOT on."""
        found, at = list[int](), place
        while at != ROOT:
            at = self.parents[at]
            found.append(at)
        return found[::-1]

    def accepted_path(self, tokens: abc.Sequence[int]) -> list[int]:
        """The places of those of the first ``tokens`` that were guessed, one behind the other."""
        found, at = list[int](), ROOT
        for token in tokens:
            at = next((i for i, p in enumerate(self.parents) if p == at and self.tokens[i] == token), ROOT)
            if at == ROOT:
                break
            found.append(at)
        return found

    def select(self, places: abc.Sequence[int]) -> Draft:
        """Of these places alone, in this order; each comes later than what it goes on from."""
        new = {ROOT: ROOT} | {place: i for i, place in enumerate(places)}
        return Draft(
            tuple(self.tokens[i] for i in places),
            tuple(new[self.parents[i]] for i in places),
            tuple(self.buckets[i] for i in places),
        )


@dataclass(frozen=True)
class DraftRequest:
    """A sequence that tokens are guessed for, one behind the other ``most`` of them, in ``width`` branches at most."""

    sequence: Sequence
    max_tokens: int
    max_branches: int = 1


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

    def propose(self, requests: abc.Sequence[DraftRequest]) -> list[Draft]:
        """A guess for each, empty for none."""
        ...

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of the last guess's first path ``drafted`` tokens were verified, and the first ``accepted`` are part of the
        answer now."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """The answer is complete, and may be learnt from. ``forget`` follows."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept of a sequence. Without effect for one that is not known."""
        ...
