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

    A place is an index in ``tokens``. ``parents[i] < i`` is the place of the token before ``tokens[i]``, ROOT for the
    sequence's last token. ``buckets[i]`` is the token's confidence bucket, an index in the proposer's ``priors``. The
    likeliest child of a token is the first one.
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
        """Places whose parent is ``place``, which may be ROOT."""
        return [i for i, parent in enumerate(self.parents) if parent == place]

    def paths(self) -> list[list[int]]:
        """Splits the tree into paths along first children.

        The first path begins at the root; each other path begins at a token that is not its parent's first child.
        """
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
        """Places on the path from ROOT (included) to ``place`` (excluded)."""
        found, at = list[int](), place
        while at != ROOT:
            at = self.parents[at]
            found.append(at)
        return found[::-1]

    def accepted_path(self, tokens: abc.Sequence[int]) -> list[int]:
        """Returns the longest path from ROOT whose draft tokens equal the first of ``tokens``, as places."""
        found, at = list[int](), ROOT
        for token in tokens:
            at = next((i for i, p in enumerate(self.parents) if p == at and self.tokens[i] == token), ROOT)
            if at == ROOT:
                break
            found.append(at)
        return found

    def select(self, places: abc.Sequence[int]) -> Draft:
        """Returns the subtree of these places, in the given order; each parent must precede its children."""
        new = {ROOT: ROOT} | {place: i for i, place in enumerate(places)}
        return Draft(
            tuple(self.tokens[i] for i in places),
            tuple(new[self.parents[i]] for i in places),
            tuple(self.buckets[i] for i in places),
        )


@dataclass(frozen=True)
class DraftRequest:
    """Request for a draft of at most ``max_tokens`` depth and ``max_branches`` paths."""

    sequence: Sequence
    max_tokens: int
    max_branches: int = 1


class Proposer(Protocol):
    """Source of draft tokens. Only the engine's thread uses it.

    ``forget`` drops the state of a sequence; ``propose`` may be called for the same sequence again.
    """

    @property
    def priors(self) -> tuple[float, ...]:
        """Initial acceptance probability of each confidence bucket."""
        ...

    @property
    def step_seconds(self) -> float:
        """Seconds to propose one more draft token for all requests; 0 if unknown or negligible."""
        ...

    def propose(self, requests: abc.Sequence[DraftRequest]) -> list[Draft]:
        """Returns one draft per request; a draft may be empty."""
        ...

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records that ``accepted`` of ``drafted`` verified tokens of the last draft's first path were accepted."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Learns from a complete answer. The caller calls ``forget`` next."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of a sequence. Idempotent."""
        ...
