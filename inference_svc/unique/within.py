"""Values without duplicates within a text of another form: the arguments of calls.

The grammar says where such a value may begin; it is recognized by the bytes before it, which a call that has begun
cannot but have. From there on a ``Watch`` follows it to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher

from inference_svc.unique.masking import MaskingMatcher
from inference_svc.unique.vocabulary import Vocabulary
from inference_svc.unique.watch import Allowed, Watch

From = Literal["answer", "marker", "value", "anywhere", "call"]


@dataclass(frozen=True)
class Opening:
    """A value of ``schema`` begins behind ``text``, which is all that stands since the answer began, since a token that
    is a marker, or since the last of these values ended; or which may stand anywhere, or anywhere in a ``call`` that
    begins so."""

    since: From
    text: bytes
    schema: dict[str, Any]
    call: bytes = b""


@dataclass(frozen=True)
class Tags:
    """Calls stand between these, with ``name_end`` behind the function's name: text that begins so is one, and no value
    in one has the ``end``."""

    begin: bytes
    name_end: bytes
    end: bytes


@dataclass(frozen=True)
class _Read:
    """What was read outside of values: all since the last marker or value, as far as it may be an opening; the last
    bytes of all; and how the call began in which this is, if it is in one."""

    begun: bytes = b""
    last: bytes = b""
    call: bytes = b""


class UniqueWithin(MaskingMatcher):
    """Of a text in which values stand."""

    def __init__(
        self,
        tokens: LLMatcher,
        watches: Sequence[tuple[Opening, Watch]],
        words: Vocabulary,
        marker: int | None,
        tags: Tags | None = None,
    ) -> None:
        """Takes over ``tokens``, which stands at the beginning of the grammar without ``uniqueItems``, and ``watches``
        at the beginnings of their values; ``marker`` is the token that calls begin with, where it is one, and ``tags``
        what they stand between, where these are text."""
        super().__init__(tokens, words.texts)
        self._watches, self._words, self._marker, self._tags = watches, words, marker, tags
        texts = [opening.text for opening, _ in watches] + ([tags.begin, tags.end] if tags else [])
        self._longest = max(map(len, texts))
        self._watch: Watch | None = None
        self._since: From = "answer"
        self._read = _Read()

    def deep_copy(self) -> UniqueWithin:
        """Another one at the beginning, if this one stands there."""
        watches = [(opening, watch.another()) for opening, watch in self._watches]
        return UniqueWithin(self._tokens.deep_copy(), watches, self._words, self._marker, self._tags)

    def consume_token(self, token: int) -> bool:
        """Goes on with a token; False when that is not allowed, and nothing is from then on."""
        text = self._texts[token]
        if (self._watch is not None and not self._watch.goes(text)) or not self._tokens.consume_token(token):
            self._stuck = True
            return False
        if token == self._marker:
            self._watch, self._since, self._read = None, "marker", replace(self._read, begun=b"")
        self._stuck = not self._take(text)
        return not self._stuck

    def _take(self, text: bytes) -> bool:
        while text:
            if self._watch is None:
                size, watch, self._read = self._opened(text)
                self._watch = None if watch is None else watch.another()
            else:
                size = self._watch.length(text)
                if not self._watch.take(text[:size]):
                    return False
                self._read = replace(self._read, last=(self._read.last + text[:size])[-self._longest :])
                if self._watch.ended:
                    self._watch, self._since, self._read = None, "value", replace(self._read, begun=b"")
            text = text[size:]
        return True

    def _opened(self, text: bytes) -> tuple[int, Watch | None, _Read]:
        """How many of some bytes come before a value, and which; all of them where none begins."""
        read = self._read
        for size in range(1, len(text) + 1):
            read = self._after(read, text[size - 1 : size])
            for opening, watch in self._watches:
                if self._opens(opening, read):
                    return size, watch, read
        return len(text), None, read

    def _opens(self, opening: Opening, read: _Read) -> bool:
        if opening.since in ("anywhere", "call"):
            return read.last.endswith(opening.text) and opening.call in (b"", read.call)
        return opening.since == self._since and read.begun == opening.text

    def _after(self, read: _Read, byte: bytes) -> _Read:
        begun, last = (read.begun + byte)[: self._longest + 1], (read.last + byte)[-self._longest :]
        call, tags = read.call, self._tags
        if tags is not None and not call:
            call = tags.begin if last.endswith(tags.begin) else b""
        elif tags is not None and not call.endswith(tags.name_end):
            call += byte
        elif tags is not None and last.endswith(tags.end):
            call = b""
        return _Read(begun, last, call)

    def _denied(self, allowed: Allowed) -> set[int]:
        return self._crossing(allowed) if self._watch is None else self._watch.denied(allowed)

    def _crossing(self, allowed: Allowed) -> set[int]:
        """Tokens that would begin a value and write more of it than is looked at; of others with the same text there
        are always some."""
        tokens = np.flatnonzero(allowed & self._words.crossing).tolist()
        return {token for token in tokens if self._opened(self._texts[token])[1] is not None}
