"""Draft budget: selects the draft tokens that give the most tokens per second. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# What a tree must promise beside the best chain.
_BRANCH_MARGIN = 1.01


@dataclass(frozen=True)
class DraftNode:
    """Draft token at a place of a sequence's draft, with the probability that it is accepted."""

    chance: float
    sequence: int
    place: int
    parent: int


@dataclass(frozen=True)
class DraftSelection:
    """Selected draft tokens, likeliest first, so that ancestors come first; and the expected tokens per second."""

    nodes: tuple[DraftNode, ...] = ()
    rate: float = 0.0


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step: seconds by its number of draft rows, and seconds per branch.

    ``plain`` tokens are sampled without any draft token.
    """

    seconds: Callable[[int], float]
    branch_seconds: float
    plain: int


def select_drafts(nodes: Sequence[DraftNode], widths: Sequence[int], prices: StepCosts) -> DraftSelection:
    """Selects the best chains, or the best trees where these gain more.

    ``widths`` limits the branches of each sequence.
    """
    # What follows a guess is worth less than it: those before a place in this order are whole beginnings.
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
    """Keeps the nodes that respect the branch limits, and marks those that begin another branch."""
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
