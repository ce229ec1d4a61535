"""Incremental detokenizer: token ids to text, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_INCOMPLETE = "�"
# After so many tokens that end inside a character, their text is returned as it is.
_MAX_INCOMPLETE_TOKENS = 8


class ReasoningMarkers(NamedTuple):
    """Texts around the reasoning that precedes an answer; ``begin`` is empty if the prompt has it."""

    begin: str
    end: str


@dataclass(frozen=True)
class CallMarkers:
    """Texts that begin and end tool calls, within which stop strings have no effect.

    ``start`` has the openings that begin a call only at the start of an answer. White space before and within them is
    ignored. A call without an end marker lasts to the end of the answer. ``reasoning`` precedes the answer and has no
    calls.
    """

    openings: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    reasoning: ReasoningMarkers | None = None


class IncrementalDetokenizer:
    """Converts one request's tokens to text while the engine generates them.

    ``push`` returns only whole characters. It keeps back text that may be the beginning of a stop string. After a stop
    string, ``stopped`` is true, ``stopped_by`` is the string, and ``push`` returns no more text.

    ``text_offset`` is the offset of the last token in the text, in characters. A token that is a part of a character
    has the character's offset, and a token without text has the offset of the next text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...],
        hidden: frozenset[int],
        shows_special: bool = False,
        keeps_stop: bool = False,
        unstopped: int = 0,
        calls: CallMarkers | None = None,
        continues: Sequence[int] = (),
    ) -> None:
        """Creates a detokenizer.

        ``hidden``: tokens without text. ``shows_special``: other special tokens have text. ``keeps_stop``: the text
        contains the stop string. ``unstopped``: number of first tokens in which stop strings are ignored. ``calls``: a
        stop string inside a tool call is ignored. ``continues``: the last tokens of a text that the answer continues.
        Without it, SentencePiece's decoders remove the space before the first word.
        """
        self._decode, self._stop, self._hidden = _decoder_of(tokenizer, not shows_special), stop, hidden
        self._texts = _token_texts(tokenizer, self._decode)
        self._keeps_stop, self._unstopped = keeps_stop, unstopped
        self._known = len(tokenizer)
        before = [i for i in continues if i < self._known and i not in hidden]
        self._ids: list[int] = [] if self._decode(before).endswith(_INCOMPLETE) else before
        self._shown_from = len(self._ids)  # ids before this index are converted to text
        self._context_from = 0  # ids before this index do not affect the text of later ids
        self._held = ""
        self._unstopped_held = 0  # first characters of the held text, in which stop strings are ignored
        self._pushed, self._characters = 0, 0  # tokens; characters of whole text, with the held text
        self._incomplete = ""  # text of the tokens that end with a part of a character
        self.text_offset = 0
        self._calls, self._in_call = calls if stop else None, False
        # It is decided whether the answer begins with a call; or the held text may still become the start of a call.
        self._begun = self._undecided = False
        reasoning = calls.reasoning if calls is not None else None
        self._reasoning_start: tuple[str, ...] = () if reasoning is None else (reasoning.begin,)
        self._reasoning_end: tuple[str, ...] = () if reasoning is None else (reasoning.end,)
        self._in_reasoning = False
        self._answer_from = 0  # index in the held text at which the answer begins, behind the reasoning
        self.stopped_by = ""

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_by)

    def push(self, token: int, has_text: bool = True) -> str:
        """Adds a token and returns the new text. A stop token that ends the answer has no text."""
        self._pushed += 1
        # A model may have more ids than its tokenizer (padding of the vocabulary). Additional ids have no text.
        hidden = not has_text or token in self._hidden or token >= self._known or self.stopped
        text = "" if hidden else self._texts[token] if self._texts is not None else None
        if text == "":
            self.text_offset = self._characters + len(self._incomplete.rstrip(_INCOMPLETE))
            return ""
        self.text_offset = self._characters
        self._ids.append(token)
        if text is None or self._incomplete:
            text = self._text_in_context()
            if self._incomplete:
                self.text_offset += _offset_after(self._incomplete, text)
            if text.endswith(_INCOMPLETE) and len(self._ids) - self._shown_from < _MAX_INCOMPLETE_TOKENS:
                self._incomplete = text
                return ""
            self._incomplete = ""
        self._characters += len(text)
        self._context_from, self._shown_from = self._shown_from, len(self._ids)
        return self._release(text) if self._stop else text

    def finish(self) -> str:
        """Ends the text and returns the part that ``push`` kept back."""
        if self.stopped:
            return ""
        rest = self._text_in_context()
        self._shown_from = len(self._ids)
        self._begun = True
        out = self._release(rest) if self._stop else rest
        if not self.stopped:
            out, self._held = out + self._held, ""
        return out

    def _text_in_context(self) -> str:
        """Returns the text of the tokens whose text was not returned yet."""
        before = self._decode(self._ids[self._context_from : self._shown_from])
        return self._decode(self._ids[self._context_from :])[len(before) :]

    def _release(self, text: str) -> str:
        self._held += text
        if self._pushed <= self._unstopped:
            self._unstopped_held = len(self._held)
        calls = self._skip_calls(self._calls) if self._calls is not None else ""
        if self._in_call or self._undecided:
            return calls
        found = self._first_stop()
        if found is not None:
            start, end = found
            self.stopped_by = self._held[start:end]
            return calls + self._held[: end if self._keeps_stop else start]
        openings = self._calls.openings if self._calls is not None else ()
        markers = self._reasoning_end if self._in_reasoning else openings
        return calls + self._take_all_but_beginning_of(self._stop, markers)

    def _first_stop(self) -> tuple[int, int] | None:
        return _first(self._held, self._stop, self._unstopped_held)

    def _skip_calls(self, calls: CallMarkers) -> str:
        """Takes the text up to the end of the last call, unless a stop string comes before; may end inside a call."""
        out = ""
        while True:
            if self._in_call:
                ended = _first(self._held, calls.ends)
                if ended is None:
                    return out + self._take_all_but_beginning_of((), calls.ends)
                self._in_call, taken = False, ended[1]
            else:
                opened = self._first_opening(calls)
                stopped = self._first_stop()
                if opened is None or (stopped is not None and stopped[0] < opened[0]):
                    return out
                self._in_call, taken = True, opened[1]
            out += self._take(taken)

    def _first_opening(self, calls: CallMarkers) -> tuple[int, int] | None:
        if self._beginning().startswith(self._reasoning_start):
            self._reasoning_start, self._in_reasoning, self._undecided = (), True, False
        if self._in_reasoning:
            ended = _first(self._held, self._reasoning_end)
            if ended is None:
                return None
            self._in_reasoning, self._answer_from = False, ended[1]
        beginning = self._beginning()
        started, starts = beginning.startswith(calls.start), calls.start + self._reasoning_start
        # The start of a call or of the reasoning may arrive in parts.
        self._undecided = bool(beginning) and not started and any(one.startswith(beginning) for one in starts)
        self._begun |= bool(beginning) and not self._undecided
        answer_from = self._answer_from
        return (answer_from, len(self._held)) if started else _first(self._held, calls.openings, answer_from)

    def _beginning(self) -> str:
        """Returns the held text of an answer whose start is not decided, without white space."""
        return "" if self._begun else "".join(self._held[self._answer_from :].split())

    def _take_all_but_beginning_of(self, stops: tuple[str, ...], markers: tuple[str, ...]) -> str:
        """Takes the text, except an end that may be the beginning of a stop string or a marker."""
        stoppable = self._held[self._unstopped_held :]
        lengths = [*(_overlap(stoppable, stop) for stop in stops), *(_overlap(self._held, one) for one in markers)]
        return self._take(len(self._held) - max(lengths, default=0))

    def _take(self, length: int) -> str:
        out, self._held = self._held[:length], self._held[length:]
        self._unstopped_held = max(0, self._unstopped_held - length)
        self._answer_from = max(0, self._answer_from - length)
        return out


def _decoder_of(tokenizer: PreTrainedTokenizerBase, skip_special: bool) -> partial[str]:
    """Returns the tokenizer's ``decode``, without transformers' conversions where these change nothing.

    The conversions take ten times as long as decoding one token.
    """
    kind = type(tokenizer)
    own = kind.decode is PreTrainedTokenizerBase.decode and isinstance(tokenizer, PreTrainedTokenizerFast)
    if own and kind._decode is PreTrainedTokenizerFast._decode and not _cleans_up(tokenizer):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special)
    return partial(tokenizer.decode, skip_special_tokens=skip_special)


class _TokenTexts(dict[int, str | None]):
    """Texts of tokens that have the same text everywhere; None for a token that is a part of a character."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token: int) -> str | None:
        text = self._decode([token])
        self[token] = None if _INCOMPLETE in text else text
        return self[token]


# By the tokenizer and by whether special tokens are skipped.
_texts_of: WeakKeyDictionary[PreTrainedTokenizerBase, dict[bool, _TokenTexts]] = WeakKeyDictionary()


def _token_texts(tokenizer: PreTrainedTokenizerBase, decode: partial[str]) -> _TokenTexts | None:
    """Returns the texts of a byte-level BPE's tokens, which do not depend on their neighbours; else None.

    All detokenizers of a tokenizer share them: the tokenizer needs a microsecond to decode one token.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or decode.func != tokenizer.backend_tokenizer.decode:
        return None
    if type(tokenizer.backend_tokenizer.decoder).__name__ != "ByteLevel":
        return None
    shared = _texts_of.setdefault(tokenizer, {})
    return shared.setdefault(decode.keywords["skip_special_tokens"], _TokenTexts(decode))


def _cleans_up(tokenizer: PreTrainedTokenizerFast) -> bool:
    """True if the tokenizer's ``decode`` removes spaces before punctuation. Newer transformers do not do so for BPE."""
    for_bpe = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces and (for_bpe or not is_bpe))


def _offset_after(incomplete: str, text: str) -> int:
    """Returns the offset in ``text`` of the token that changed the text ``incomplete`` to ``text``.

    Each replacement character at the end may become a part of another character.
    """
    if text.endswith(_INCOMPLETE):
        return len(incomplete.rstrip(_INCOMPLETE))
    return next(n for n in range(len(incomplete), -1, -1) if text.startswith(incomplete[:n]))


def _first(text: str, markers: tuple[str, ...], begin: int = 0) -> tuple[int, int] | None:
    """Returns start and end of the first marker in ``text`` from ``begin`` on."""
    return min(((at, at + len(marker)) for marker in markers if (at := text.find(marker, begin)) >= 0), default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def split_text(decode: Callable[[list[int]], str], tokens: list[int], ends: Sequence[int]) -> list[str]:
    """Splits the text of ``tokens`` at the token counts ``ends`` (ascending; the last is the number of tokens).

    The joined pieces are the text of all tokens. If a character's tokens are in two pieces, it is in the second piece.
    Each piece is decoded with the piece before it as context, as in ``IncrementalDetokenizer``, because a token's text
    may depend on the token before.
    """
    whole, cuts, at = decode(tokens), [0], 0
    context_from = piece_from = 0
    for end in ends[:-1]:
        before = decode(tokens[context_from:piece_from])
        after = decode(tokens[context_from:end])
        if not after.endswith(_INCOMPLETE):
            at = min(len(whole), at + max(0, len(after) - len(before)))
            context_from, piece_from = piece_from, end
        cuts.append(at)
    cuts.append(len(whole))
    return [whole[a:b] for a, b in pairwise(cuts)]
