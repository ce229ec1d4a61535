"""Proposer: the interface of draft-token sources, and the draft tree."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

from inference_svc.sequence.sequence import Sequence

ROOT = -1


@dataclass(frozen=True)
class Draft:
    """Tree of draft tokens after a sequence.

    ``parents[i] < i`` is the place of the token before ``tokens[i]``, ROOT for the sequence's last one; ``buckets[i]``
    is its confidence bucket, below the number of the proposer's priors. The likeliest child comes first.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: abc.Sequence[int], buckets: abc.Sequence[int]) -> Draft:
        """Builds a draft without branches."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(buckets))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Largest number of tokens that can be accepted."""
        depths = list[int]()
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    def children(self, place: int) -> list[int]:
        """Places of the tokens after a place, or after ROOT."""
        return [i for i, parent in enumerate(self.parents) if parent == place]

    def paths(self) -> list[list[int]]:
        """Splits the tree into paths along first children: the first from the root, the others from a later child."""
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
        """Places before a place, from the root on."""
        found, at = list[int](), place
        while at != ROOT:
            at = self.parents[at]
            found.append(at)
        return found[::-1]

    def accepted_path(self, tokens: abc.Sequence[int]) -> list[int]:
        """Returns the places of the leading ``tokens`` that the draft contains."""
        found, at = list[int](), ROOT
        for token in tokens:
            at = next((i for i, p in enumerate(self.parents) if p == at and self.tokens[i] == token), ROOT)
            if at == ROOT:
                break
            found.append(at)
        return found

    def select(self, places: abc.Sequence[int]) -> Draft:
        """Returns the subtree of these places, in this order; each comes after its parent."""
        new = {ROOT: ROOT} | {place: i for i, place in enumerate(places)}
        return Draft(
            tuple(self.tokens[i] for i in places),
            tuple(new[self.parents[i]] for i in places),
            tuple(self.buckets[i] for i in places),
        )


@dataclass(frozen=True)
class DraftRequest:
    """Request for a draft of a sequence: up to ``max_tokens`` deep, up to ``max_branches`` branches."""

    sequence: Sequence
    max_tokens: int
    max_branches: int = 1


class Proposer(Protocol):
    """Source of draft tokens. Only the engine's thread uses it.

    State of a sequence is dropped by ``forget``; a forgotten sequence may be proposed for again.
    """

    @property
    def priors(self) -> tuple[float, ...]:
        """Initial acceptance probability of each confidence bucket."""
        ...

    @property
    def step_seconds(self) -> float:
        """Seconds of one more draft token for all requests; 0 while unknown, or if negligible."""
        ...

    def propose(self, requests: abc.Sequence[DraftRequest]) -> list[Draft]:
        """Returns a draft for each request, empty for none."""
        ...

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Reports that ``drafted`` tokens of the last draft's first path were verified and ``accepted`` accepted."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Learns from a complete answer. ``forget`` follows."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of a sequence. Idempotent."""
        ...
