"""Draft budget: selects the draft tokens with the most expected tokens per second.

Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A tree is selected only if its expected tokens per second exceed those of the best chain by this factor.
_BRANCH_MARGIN = 1.01


@dataclass(frozen=True)
class DraftNode:
    """Draft token at index ``place`` of a sequence's draft; ``chance`` is its acceptance probability."""

    chance: float
    sequence: int
    place: int
    parent: int


@dataclass(frozen=True)
class DraftSelection:
    """Selected draft tokens, and ``rate``, the expected tokens per second.

    ``nodes`` are in order of decreasing probability, so each parent precedes its children.
    """

    nodes: tuple[DraftNode, ...] = ()
    rate: float = 0.0


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step: seconds by its number of draft rows, and seconds per branch.

    ``plain`` is the number of tokens that the step samples without draft tokens.
    """

    seconds: Callable[[int], float]
    branch_seconds: float
    plain: int


def select_drafts(nodes: Sequence[DraftNode], widths: Sequence[int], prices: StepCosts) -> DraftSelection:
    """Selects the best chains, or the best trees if these give more.

    ``widths`` are the maximum numbers of paths of each sequence.
    """
    # A child is never likelier than its parent, so each prefix of this order contains the parents of its nodes.
    ordered = sorted(nodes, key=lambda node: -node.chance)
    best = _best(ordered, [1] * len(widths), prices)
    if max(widths) > 1:
        tree = _best(ordered, widths, prices)
        if tree.rate > best.rate * _BRANCH_MARGIN:
            best = tree
    return best


def _best(ordered: Sequence[DraftNode], widths: Sequence[int], prices: StepCosts) -> DraftSelection:
    taken, forked = _fitting(ordered, widths)
    expected, branches, count, rate = float(prices.plain), 0, 0, 0.0
    for i, node in enumerate(taken):
        expected += node.chance
        branches += forked[i]
        found = expected / (prices.seconds(i + 1) + branches * prices.branch_seconds)
        if found > rate:
            rate, count = found, i + 1
    return DraftSelection(tuple(taken[:count]), rate)


def _fitting(ordered: Sequence[DraftNode], widths: Sequence[int]) -> tuple[list[DraftNode], list[bool]]:
    """Drops nodes that exceed the branch limits. Returns the other nodes, and for each whether it begins a branch."""
    taken, forked = list[DraftNode](), list[bool]()
    there, children, branches = set[tuple[int, int]](), set[tuple[int, int]](), Counter[int]()
    for node in ordered:
        behind = node.sequence, node.parent
        forks = behind in children
        missing = node.parent >= 0 and behind not in there
        if missing or (forks and branches[node.sequence] == widths[node.sequence] - 1):
            continue
        branches[node.sequence] += forks
        children.add(behind)
        there.add((node.sequence, node.place))
        taken.append(node)
        forked.append(forks)
    return taken, forked
