"""One JSON value without duplicates, as it is written: which of the allowed tokens would make one, or leave no way on.

A token is denied that makes an item equal to an earlier one, or behind which every way on would. So at least one way to
the value's end is left at every place. What a token says beyond that end is nobody's business here.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from inference_svc.unique.places import Places
from inference_svc.unique.scan import BACKSLASH, QUOTE, WHITESPACE, WRITTEN, Mode, Scan, follow, start, step
from inference_svc.unique.search import MOST_STEPS, bytes_of_rivals, way_on
from inference_svc.unique.vocabulary import Vocabulary

Allowed = NDArray[np.bool_]
_SPACE = bytes(WHITESPACE)
# So much is looked for in one place of the text; what is not found by then is not there.
_MOST_STEPS = 5_000


class Watch:
    """Belongs to one thread at a time."""

    def __init__(self, by_bytes: LLMatcher, vocabulary: Vocabulary, places: Places, state: Scan | None = None) -> None:
        """Takes over ``by_bytes``, which stands at the beginning of the value's grammar without ``uniqueItems``, and
        whose tokens are bytes."""
        self._bytes, self._vocabulary, self._places = by_bytes, vocabulary, places
        self._state = start(places.start) if state is None else state
        self._ways: dict[bytes, bytes] = {}  # behind these bytes one may go on by those; by none where that is empty
        self._found: list[bytes] = []  # ways on from here that are known
        self._steps_left = _MOST_STEPS

    def another(self) -> Watch:
        """Another one at the same place."""
        return Watch(self._bytes.deep_copy(), self._vocabulary, self._places, self._state)

    @property
    def ended(self) -> bool:
        """The value is whole. A number is only when something else follows."""
        return self._state.mode is Mode.AFTER and self._state.top is None

    @property
    def failed(self) -> bool:
        return self._bytes.is_error()

    def length(self, text: bytes) -> int:
        """How many of these bytes belong to the value."""
        state: Scan | None = self._state
        for at, byte in enumerate(text):
            state = None if state is None else step(state, byte)
            if state is not None and state.mode is Mode.AFTER and state.top is None:
                return at + 1
        return len(text)

    def goes(self, text: bytes) -> bool:
        """Whether these bytes make no duplicate."""
        return follow(self._state, text) is not None

    def take(self, text: bytes) -> bool:
        """Goes on with bytes of the value. False, and nothing else may be asked any more, where they make a duplicate
        or are none of the grammar's."""
        after = follow(self._state, text)
        if after is None:
            return False
        self._found = [way[len(text) :] for way in self._begun(text)]
        self._state, self._ways = after, {}
        return not text or self._bytes.consume_tokens(list(text))

    def _begun(self, text: bytes) -> Iterable[bytes]:
        """Known ways that begin with some bytes."""
        yield from (way for way in self._found if way.startswith(text))
        if self._ways.get(text):
            yield text + self._ways[text]

    def denied(self, allowed: Allowed) -> set[int]:
        """The tokens, of those that are ``allowed``, that must not come next."""
        self._steps_left = _MOST_STEPS
        state, denied = self._state, set[int]()
        words = self._vocabulary
        written = state.mode in (Mode.STRING, Mode.NAME)
        for token in np.flatnonzero(allowed & (words.beginning_in_string if written else words.beginning)).tolist():
            text = words.texts[token]
            after = follow(state, text)
            if after is None or not self._goes_on(text, after):
                denied.add(token)
        if state.threatened:
            self._walk(b"", state, allowed, denied)
        return denied

    def _walk(self, prefix: bytes, state: Scan, allowed: Allowed, denied: set[int]) -> None:
        """Looks at the tokens that begin with some bytes, behind which something has rivals, and go on so."""
        words = self._vocabulary
        for byte in _relevant(state) or words.next_bytes(prefix):
            text = prefix + bytes((byte,))
            tokens, same = words.beginning_with(text)
            whole, able = tokens[:same][allowed[tokens[:same]]], tokens[allowed[tokens]]
            if not len(able):
                continue
            after = step(state, byte)
            if after is None:
                denied.update(able.tolist())
            elif after.threatened:
                if len(whole) and not self._goes_on(text, after):
                    denied.update(whole.tolist())
                if len(able) > len(whole):
                    self._walk(text, after, allowed, denied)

    def _goes_on(self, text: bytes, after: Scan) -> bool:
        """Behind some bytes there is a way to the end."""
        if not after.threatened or any(way.startswith(text) and way != text for way in self._found):
            return True
        top = after.top
        if after.begins_item and after.only_own and top is not None and top.place.plenty > len(top.parts):
            return True
        if after.mode not in WRITTEN:  # more white space changes nothing
            bare = text.rstrip(_SPACE)
            text = text[: len(bare) + 1]
            if not bare and self._state.mode not in WRITTEN:
                return True
        if text in self._ways:
            return bool(self._ways[text])
        if not self._bytes.consume_tokens(list(text)):
            return False
        way, steps = way_on(self._bytes, after, min(MOST_STEPS, self._steps_left))
        self._steps_left -= steps
        self._bytes.rollback(len(text))
        self._ways[text] = way
        return bool(way)


def _relevant(state: Scan) -> Iterable[int]:
    """In a string, the bytes behind which it may still have rivals; empty where that may be any."""
    if state.mode not in (Mode.STRING, Mode.NAME) or state.text:
        return ()
    return sorted(bytes_of_rivals(state) | {QUOTE, BACKSLASH})
