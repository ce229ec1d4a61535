"""Paragraph and message ends in token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLANK_LINE, _ENDS_LINE, _STARTS_LINE, _SPECIAL = 1, 2, 4, 8
# Forms of a line feed in vocabularies: plain, in byte-level BPE, and as a byte token of SentencePiece.
_LINE_FEEDS = ("\n", "Ċ", "<0x0A>")
# Markup such as a role's name may follow a special token on the same line: at most this many tokens.
_HEADER_TOKENS = 4


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens with their texts; some are special only in tokenizer.json."""
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return dict(named) | {token: str(text) for token, text in added if text.special}


@dataclass(frozen=True)
class TextStructure:
    """Tokens that end paragraphs or mark up messages, as ``kinds [vocabulary]``: one bit mask per token id.

    With ``kinds`` None, ``ends`` finds no paragraphs or messages.
    """

    kinds: NDArray[np.uint8] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> TextStructure:
        """Read a tokenizer's vocabulary."""
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        kinds = np.zeros(max(vocabulary.values(), default=0) + 1, np.uint8)
        for written, token in vocabulary.items():
            if any(feed in written for feed in _LINE_FEEDS):
                text = str(tokenizer.decode([token])).replace("\r", "")
                kinds[token] = (
                    _BLANK_LINE * ("\n\n" in text)
                    | _ENDS_LINE * text.endswith("\n")
                    | _STARTS_LINE * text.startswith("\n")
                )
        kinds[list(special_tokens(tokenizer))] |= _SPECIAL
        return cls(kinds)

    def ends(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ascending indices after blank lines, and on both sides of a chat template's markup.

        A blank line is a token, a part of a token (".\\n\\n"), or the line feeds of two tokens. An index depends only
        on a few tokens around it.
        """
        if self.kinds is None or not len(tokens):
            return np.empty(0, np.int64)
        kinds = np.where(tokens < len(self.kinds), self.kinds[np.minimum(tokens, len(self.kinds) - 1)], 0)
        blank = (kinds & _BLANK_LINE) > 0
        blank[1:] |= ((kinds[:-1] & _ENDS_LINE) > 0) & ((kinds[1:] & _STARTS_LINE) > 0)
        blank[:-1] &= (kinds[1:] & _STARTS_LINE) == 0  # consecutive blank lines have one end
        special, closing = (kinds & _SPECIAL) > 0, (kinds & (_SPECIAL | _ENDS_LINE)) > 0
        markup, opening = special.copy(), special.copy()
        for distance in range(1, min(_HEADER_TOKENS, len(kinds) - 1) + 1):
            headers = np.flatnonzero(opening[:-distance] & closing[distance:])
            opening[headers] = False
            for inside in range(1, distance + 1):
                markup[headers + inside] = True
        edges = np.flatnonzero(np.diff(markup)) + 1
        return np.union1d(np.flatnonzero(blank) + 1, edges)
