"""Patterns that look around, as patterns that do not and that all hold, for a compiler that does not look around.

What stands ahead of a pattern that begins at the text's beginning, or behind one that goes to its end, says something
of the whole text: ``^(?!aws:)(?=.*[0-9]).{1,9}$`` is three patterns, the first of them the complement of ``^aws:``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from inference_svc.complement import NotWritten, complement

# Escapes, classes, and the marks of groups and alternatives, one by one.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]|\(|\)|\||.", re.DOTALL)
_LONGEST, _MOST_LOOKS = 2000, 16
Complement = Callable[[str], str]
_BACK = ("(?<=", "(?<!")
_LOOKS = ("(?=", "(?!", *_BACK)
# A character at a time, none of which something begins at, from the beginning to the end.
_TEMPERED = re.compile(r"\((?:\?:)?\(\?!(?P<never>[^()]*)\)(?P<one>\[[^\]]*\]|\.|\\[wdsWDS])\)(?P<many>[+*])\$")


def looks_around(pattern: str) -> bool:
    """Also a pattern that says so where it means other characters, if it is very long."""
    if not any(look in pattern for look in _LOOKS):
        return False
    return len(pattern) > _LONGEST or any(piece in _LOOKS for piece in _PIECE.findall(pattern))


def without_looking(pattern: str, complement: Complement = complement) -> list[list[str]]:
    """Of which lists of patterns all must hold of one, for the same texts: at least one list of at least one. Raises
    NotWritten."""
    if len(pattern) > _LONGEST:
        raise NotWritten("it is too long")
    return [found for alternative in _alternatives(pattern) for found in _apart(alternative, complement)]


def _alternatives(pattern: str) -> list[str]:
    depth, cuts, at = 0, [-1], 0
    for piece in _PIECE.findall(pattern):
        depth += piece.startswith("(") - (piece == ")")
        if piece == "|" and not depth:
            cuts.append(at)
        at += len(piece)
    return [pattern[a + 1 : b] for a, b in pairwise([*cuts, len(pattern)])]


def _apart(pattern: str, complement: Complement) -> list[list[str]]:
    """Of one alternative."""
    if not looks_around(pattern):
        return [[pattern]]
    at_beginning = pattern.startswith("^")
    rest, found = pattern.removeprefix("^"), list[str]()
    only_there = True
    while rest.startswith(("(?=", "(?!")):
        inner, rest, sign = *_group(rest, 3), rest[2]
        only_there = only_there and sign == "!" and inner.startswith("^") and len(_alternatives(inner)) == 1
        alone = inner.removeprefix("^") if len(_alternatives(inner)) == 1 else inner
        found.append(_held(f"^(?:{alone})", sign, complement))
        if len(found) > _MOST_LOOKS:
            raise NotWritten("it looks around too often")
    behind = _behind(rest) if at_beginning else None
    if behind is not None:
        rest, inner, sign = behind
        found.append(_held(f"(?:{inner})$", sign, complement))
    tempered = _TEMPERED.fullmatch(rest) if at_beginning else None
    if tempered is not None:
        rest = f"{tempered['one']}{tempered['many']}$"
        found.append(_held(tempered["never"], "!", complement))
    if looks_around(rest) or not (at_beginning or only_there):
        raise NotWritten("it looks around in its middle")
    both = [*found, f"^(?:{rest})"]
    # What looks for the beginning alone says nothing of any other place that the pattern may be found at.
    return [both] if at_beginning else [both, [f"(?s:.)(?:{rest})"]]


def _group(pattern: str, opening: int) -> tuple[str, str]:
    """What stands in the group that a pattern begins with, and what follows it."""
    depth, at = 0, 0
    for piece in _PIECE.findall(pattern):
        depth += piece.startswith("(") - (piece == ")")
        at += len(piece)
        if not depth:
            return pattern[opening : at - 1], pattern[at:]
    raise NotWritten("a group of it is not closed")


def _behind(pattern: str) -> tuple[str, str, str] | None:
    """Of a pattern that looks back at its end: what is before, what it looks for, and whether it must be there."""
    at, end = -1, 0
    for piece in _PIECE.findall(pattern):
        at, end = (end if piece in _BACK else at), end + len(piece)
    if at < 0:
        return None
    inner, after = _group(pattern[at:], 4)
    return (pattern[:at] + "$", inner, pattern[at + 3]) if after == "$" else None


def _held(pattern: str, sign: str, complement: Complement) -> str:
    """A pattern that holds where one is found, or is not. Raises NotWritten."""
    if looks_around(pattern):
        raise NotWritten("it looks around in what it looks for")
    return pattern if sign == "=" else complement(pattern)
