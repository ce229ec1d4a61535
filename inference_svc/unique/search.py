"""Whether a text that may become a duplicate can still become something else, and by which bytes.

The grammar is followed byte by byte. What is looked for is a place at which no finished item is a rival any more, or
the item has ended as a new one: the grammar leads from there to the end. Of white space one way is tried, because it
says nothing. What remains is as large as the rivals' texts, but for numbers, whose zeros never end: so there is a
limit, and beyond it a text counts as one that cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from llguidance import LLMatcher

from inference_svc.unique.scan import BACKSLASH, QUOTE, WHITESPACE, WRITTEN, Mode, Scan, step

MOST_STEPS = 1_000
# Digits behind these say nothing that a number read as a float keeps.
_MOST_DIGITS, _MOST_OF_EXPONENT = 24, 3
# What ends something comes first, and zeros, of which there may be any number, last.
_RANK = {byte: i for i, byte in enumerate(b'"]},tfneE123456789[{: \n\r\t-.+0\\')}


def safe(state: Scan) -> bool:
    """What was being written is no duplicate and will be none: nothing is its rival, or it has ended and another item
    is to come, or may."""
    return not state.threatened or (state.begins_item and state.only_own)


def way_on(
    grammar: LLMatcher, state: Scan, most: int = MOST_STEPS, reached: Callable[[Scan], bool] = safe
) -> tuple[bytes, int]:
    """Bytes that lead from a state to one that is ``reached``, none where there are no such or none were found in
    ``most`` steps; and the steps that were gone. ``grammar`` takes bytes for tokens; it stands where the state does,
    and then again."""
    path, ways = bytearray(), [_ways(grammar, state)]
    longest = len(state.text) + _MOST_DIGITS
    steps = 0
    try:
        while ways and steps < most:
            steps += 1
            found = next(ways[-1], None)
            if found is None:
                ways.pop()
                if path:
                    path.pop()
                    grammar.rollback(1)
                continue
            byte, after = found
            if reached(after):
                return bytes(path) + bytes((byte,)), steps
            if not _endless(after, longest) and grammar.consume_token(byte):
                path.append(byte)
                ways.append(_ways(grammar, after))
        return b"", steps
    finally:
        if path:
            grammar.rollback(len(path))


def _endless(state: Scan, longest: int) -> bool:
    """A number that is not worth following any further."""
    if state.mode is not Mode.NUMBER:
        return False
    exponent = state.text.lower().partition(b"e")[2].lstrip(b"+-")
    return len(state.text) > longest or len(exponent) > _MOST_OF_EXPONENT


def allowed_bytes(grammar: LLMatcher) -> list[int]:
    """What may follow, by the grammar alone."""
    bits = np.unpackbits(np.frombuffer(grammar.compute_bitmask(), np.uint8)[:32], bitorder="little")
    return [int(byte) for byte in np.flatnonzero(bits)]


def _ways(grammar: LLMatcher, state: Scan) -> Iterator[tuple[int, Scan]]:
    """The bytes that may follow, and what comes of each; without those that make a duplicate."""
    allowed = allowed_bytes(grammar)
    if state.mode not in WRITTEN:
        said = [byte for byte in allowed if byte not in WHITESPACE]
        allowed = said or allowed[:1]
    if state.mode in (Mode.STRING, Mode.NAME) and not state.text:
        likely = bytes_of_rivals(state)
        other = next((b for b in allowed if b not in likely and b not in (QUOTE, BACKSLASH)), None)
        order = sorted(
            allowed, key=lambda b: (b != other if likely else b != QUOTE, b != QUOTE, b not in likely, b == BACKSLASH)
        )
    else:
        order = sorted(allowed, key=lambda b: _RANK.get(b, len(_RANK)))
    for byte in order:
        after = step(state, byte)
        if after is not None:
            yield byte, after


def bytes_of_rivals(state: Scan) -> set[int]:
    """The bytes by which a string goes on as a rival does."""
    if state.mode is Mode.STRING:
        return {value[state.length] for value in state.rivals.values() if len(value) > state.length}
    names = [name for value in state.rivals.values() for name in value if name.startswith(state.read)]
    return {name[state.length] for name in names if len(name) > state.length}
