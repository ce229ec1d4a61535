"""Beginnings of a prompt that a request asks to retain, and their canonical form."""

from __future__ import annotations

from collections.abc import Iterable

MAX_RETAINED_PREFIXES = 64
WHOLE_PROMPT = 2**32 - 1  # an end beyond the prompt, which includes the answer's tokens

RetainedPrefixes = tuple[tuple[int, int], ...]


def retained_prefixes(wanted: Iterable[tuple[int, int]]) -> RetainedPrefixes:
    """Drop redundant prefixes ``(end in tokens, seconds)``; sort the remaining prefixes by end.

    A prefix is redundant if a longer prefix is retained at least as long. So the result has rising ends and falling
    times. Returns at most the 64 longest prefixes.
    """
    longest: dict[int, int] = {}
    for end, seconds in wanted:
        longest[end] = max(seconds, longest.get(end, 0))
    found: list[tuple[int, int]] = []
    most = 0
    for end in sorted(longest, reverse=True):
        if end > 0 and longest[end] > most:
            most = longest[end]
            found.append((end, most))
    return tuple(reversed(found[:MAX_RETAINED_PREFIXES]))
