"""A regular expression for all texts in which another one is not found, for a compiler that has no word for "not".

The expression is read by Python's own parser, made an automaton over ranges of characters (Thompson's construction and
that of subsets), turned over, and written again (Kleene's, state by state). Where readers of regular expressions
differ, what is found is taken as wide as any has it, so that nothing of it is left in the complement: ``$`` also before
a last line end, ``.`` also for all line ends but one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from re import _constants as words  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Ranges = tuple[tuple[int, int], ...]
_LAST = 0x10FFFF
_ALL: Ranges = ((0, _LAST),)
# What these bound takes a tenth of a second at most.
_MOST_STATES, _MOST_KNOWING, _MOST_RANGES, _MOST_CHARACTERS = 256, 32, 64, 6000
_LINE_END = 10
_SPACES: Ranges = ((9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                   (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))  # fmt: skip


class NotWritten(ValueError):
    """The complement of an expression is not written here: it has back references or look-around of its own, classes
    that readers differ in, or it would be too long."""


def complement(pattern: str) -> str:
    """The texts in which ``pattern`` is found nowhere, as an expression that is kept to as a whole. Raises
    NotWritten."""
    try:
        read = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise NotWritten(f"{pattern[:80]!r} is no regular expression: {error}") from error
    if "{," in pattern:
        raise NotWritten(f"{pattern[:80]!r} has a count that readers differ in")
    if read.state.flags & ~re.UNICODE:
        raise NotWritten(f"{pattern[:80]!r} has flags")
    automaton = _Automaton()
    automaton.search(list(read))
    return f"^(?:{_written(*_turned(automaton))})$"


# ---- sets of characters -----------------------------------------------------------------------------------------


def _union(parts: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def _without(ranges: Ranges) -> Ranges:
    found, at = [], 0
    for low, high in ranges:
        if at < low:
            found.append((at, low - 1))
        at = high + 1
    return tuple(found) + (((at, _LAST),) if at <= _LAST else ())


def _class(ranges: Ranges) -> str:
    if ranges == _ALL:
        return "(?s:.)"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character(ranges[0][0])
    negative = ranges[-1][1] == _LAST
    shown = _without(ranges) if negative else ranges
    parts = (_character(a) if a == b else f"{_character(a)}-{_character(b)}" for a, b in shown)
    return f"[{'^' if negative else ''}{''.join(parts)}]"


def _character(code: int) -> str:
    if code < 128 and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def _set(items: list[Any]) -> Ranges:
    """What stands between brackets."""
    negative = bool(items) and items[0][0] is words.NEGATE
    found: list[tuple[int, int]] = []
    for kind, value in items[1:] if negative else items:
        if kind is words.LITERAL:
            found.append((value, value))
        elif kind is words.RANGE:
            found.append(value)
        elif kind is words.CATEGORY and value is words.CATEGORY_SPACE and not negative:
            found += _SPACES
        else:
            raise NotWritten("a class of characters that readers differ in")
    return _without(_union(found)) if negative else _union(found)


# ---- automata ---------------------------------------------------------------------------------------------------


_FIRST, _AT_END, _FOUND = 0, 1, 2


@dataclass
class _Automaton:
    """Of Thompson's: something is found in texts that end in one of two states, whatever follows in the last of them.
    ``free`` steps read nothing."""

    states: int = 3
    free: dict[int, set[int]] = field(default_factory=dict)
    read: list[tuple[int, Ranges, int]] = field(default_factory=lambda: [(_FOUND, _ALL, _FOUND)])

    def new(self) -> int:
        self.states += 1
        if self.states > _MOST_STATES:
            raise NotWritten("it is too long, or repeats too often")
        return self.states - 1

    def freely(self, a: int, b: int) -> None:
        self.free.setdefault(a, set()).add(b)

    def search(self, items: list[Any]) -> None:
        """All texts in which these are found."""
        if len(items) == 1 and items[0][0] is words.BRANCH:
            for part in items[0][1][1]:
                self.search(list(part))
            return
        first = self.new()
        self.freely(_FIRST, first)
        if items and items[0] == (words.AT, words.AT_BEGINNING):
            items = items[1:]
        else:
            self.read.append((first, _ALL, first))
        self.sequence(items, first, _FOUND)

    def sequence(self, items: list[Any], first: int, last: int) -> None:
        for kind, value in items:
            after = self.new()
            self.item(kind, value, first, after)
            first = after
        self.freely(first, last)

    def item(self, kind: Any, value: Any, first: int, last: int) -> None:
        if kind is words.LITERAL:
            self.read.append((first, ((value, value),), last))
        elif kind is words.NOT_LITERAL:
            self.read.append((first, _without(((value, value),)), last))
        elif kind is words.ANY:
            self.read.append((first, _without(((_LINE_END, _LINE_END),)), last))
        elif kind is words.IN:
            self.read.append((first, _set(value), last))
        elif kind is words.BRANCH:
            for part in value[1]:
                self.sequence(list(part), first, last)
        elif kind is words.SUBPATTERN and not value[1] and not value[2]:
            self.sequence(list(value[3]), first, last)
        elif kind is words.AT and value is words.AT_END:  # what comes behind it is taken for nothing
            self.freely(first, _AT_END)
            self.read.append((first, ((_LINE_END, _LINE_END),), _AT_END))
        elif kind in (words.MAX_REPEAT, words.MIN_REPEAT):
            least, most, inner = value
            self.repeat(least, most, inner, first, last)
        else:
            raise NotWritten(f"{str(kind).lower()} in it")

    def repeat(self, least: int, most: int, items: Any, first: int, last: int) -> None:
        endless = most is words.MAXREPEAT
        for copy in range(least if endless else most):
            after = self.new()
            self.sequence(list(items), first, after)
            if copy >= least:
                self.freely(first, last)
            first = after
        if endless:
            again = self.new()
            self.freely(first, again)
            self.sequence(list(items), again, again)
            first = again
        self.freely(first, last)

    def closed(self, states: Iterable[int]) -> frozenset[int]:
        """These and what is reached of them freely."""
        found = set(states)
        due = list(found)
        while due:
            more = self.free.get(due.pop(), set()) - found
            found |= more
            due += more
        return frozenset(found)


def _turned(automaton: _Automaton) -> tuple[dict[int, dict[int, Ranges]], set[int]]:
    """The steps of an automaton of the complement that knows its next state by every character, and the states in which
    it ends; it begins in state 0. States from which nothing ends are left out."""
    start = automaton.closed([_FIRST])
    number, due = {start: 0}, [start]
    steps: dict[int, dict[int, list[tuple[int, int]]]] = {}
    while due:
        at = due.pop()
        out = [(ranges, b) for a, ranges, b in automaton.read if a in at]
        cuts = sorted({0, *(c for ranges, _ in out for low, high in ranges for c in (low, high + 1)), _LAST + 1})
        if len(cuts) > _MOST_RANGES:
            raise NotWritten("it has too many ranges of characters")
        for low, after in pairwise(cuts):
            to = automaton.closed(b for ranges, b in out if any(x <= low <= y for x, y in ranges))
            if _FOUND in to:
                continue
            if to not in number:
                number[to] = len(number)
                due.append(to)
                if len(number) > _MOST_KNOWING:
                    raise NotWritten("it has too many states")
            steps.setdefault(number[at], {}).setdefault(number[to], []).append((low, after - 1))
    ends = {n for states, n in number.items() if not states & {_AT_END, _FOUND}}
    return {a: {b: _union(parts) for b, parts in to.items()} for a, to in steps.items()}, ends


def _written(steps: dict[int, dict[int, Ranges]], ends: set[int]) -> str:
    """An expression for what leads from state 0 to an end."""
    first, last = -1, -2
    edges: dict[tuple[int, int], str] = {(a, b): _class(r) for a, to in steps.items() for b, r in to.items()}
    edges |= {(first, 0): ""} | {(end, last): "" for end in ends}
    left = {state for edge in edges for state in edge} - {first, last}
    while left:
        degree = {s: sum(a == s != b for a, b in edges) * sum(b == s != a for a, b in edges) for s in left}
        gone = min(left, key=lambda s: (degree[s], s))
        left.remove(gone)
        again = edges.pop((gone, gone), None)
        loop = "" if again is None else f"(?:{again})*"
        into = [(a, e) for (a, b), e in edges.items() if b == gone]
        out = [(b, e) for (a, b), e in edges.items() if a == gone]
        edges = {edge: e for edge, e in edges.items() if gone not in edge}
        for a, before in into:
            for b, after in out:
                way, other = f"{before}{loop}{after}", edges.get((a, b))
                edges[a, b] = way if other is None else f"(?:{other}|{way})"
                if len(edges[a, b]) > _MOST_CHARACTERS:
                    raise NotWritten("its complement is too long")
    if (first, last) not in edges:
        raise NotWritten("it is found everywhere")
    return edges[first, last]
