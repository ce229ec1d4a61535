"""Values without duplicates within a text of another form: the arguments of calls.

The grammar says where such a value may begin; it is recognized by the bytes before it, which a call that has begun
cannot but have. From there on a ``Watch`` follows it to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher

from inference_svc.unique.masking import MaskingMatcher
from inference_svc.unique.vocabulary import Vocabulary
from inference_svc.unique.watch import Allowed, Watch

From = Literal["answer", "marker", "value", "anywhere"]


@dataclass(frozen=True)
class Opening:
    """A value of ``schema`` begins behind ``text``, which is all that stands since the answer began, since a token that
    is a marker, or since the last of these values ended; or which may stand anywhere."""

    since: From
    text: bytes
    schema: dict[str, Any]


class UniqueWithin(MaskingMatcher):
    """Of a text in which values stand."""

    def __init__(
        self, tokens: LLMatcher, watches: Sequence[tuple[Opening, Watch]], words: Vocabulary, marker: int | None
    ) -> None:
        """Takes over ``tokens``, which stands at the beginning of the grammar without ``uniqueItems``, and ``watches``
        at the beginnings of their values; ``marker`` is the token that calls begin with, where it is one."""
        super().__init__(tokens, words.texts)
        self._watches, self._words, self._marker = watches, words, marker
        self._longest = max(len(opening.text) for opening, _ in watches)
        self._watch: Watch | None = None
        self._since: From = "answer"
        self._begun = b""  # since then, as far as it may be an opening
        self._last = b""  # the last bytes of all

    def deep_copy(self) -> UniqueWithin:
        """Another one at the beginning, if this one stands there."""
        watches = [(opening, watch.another()) for opening, watch in self._watches]
        return UniqueWithin(self._tokens.deep_copy(), watches, self._words, self._marker)

    def consume_token(self, token: int) -> bool:
        """Goes on with a token; False when that is not allowed, and nothing is from then on."""
        text = self._texts[token]
        if (self._watch is not None and not self._watch.goes(text)) or not self._tokens.consume_token(token):
            self._stuck = True
            return False
        if token == self._marker:
            self._watch, self._since, self._begun = None, "marker", b""
        self._stuck = not self._take(text)
        return not self._stuck

    def _take(self, text: bytes) -> bool:
        while text:
            if self._watch is None:
                size, watch = self._opened(text)
                self._watch = None if watch is None else watch.another()
                self._begun = (self._begun + text[:size])[: self._longest + 1]
            else:
                size = self._watch.length(text)
                if not self._watch.take(text[:size]):
                    return False
                if self._watch.ended:
                    self._watch, self._since, self._begun = None, "value", b""
            self._last = (self._last + text[:size])[-self._longest :]
            text = text[size:]
        return True

    def _opened(self, text: bytes) -> tuple[int, Watch | None]:
        """How many of some bytes come before a value, and which; all of them where none begins."""
        for size in range(1, len(text) + 1):
            begun, last = self._begun + text[:size], self._last + text[:size]
            for opening, watch in self._watches:
                anywhere = opening.since == "anywhere" and last.endswith(opening.text)
                if anywhere or (opening.since == self._since and begun == opening.text):
                    return size, watch
        return len(text), None

    def _denied(self, allowed: Allowed) -> set[int]:
        return self._crossing(allowed) if self._watch is None else self._watch.denied(allowed)

    def _crossing(self, allowed: Allowed) -> set[int]:
        """Tokens that would begin a value and write more of it than is looked at; of others with the same text there
        are always some."""
        tokens = np.flatnonzero(allowed & self._words.crossing).tolist()
        return {token for token in tokens if self._opened(self._texts[token])[1] is not None}
