"""Character reader: base of generator parsers for streamed text.

A parser receives the next character from each ``yield``, and None at the end of the text. So its result does not depend
on the pieces in which the text arrives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
# A parser: it receives characters and then None, and returns T.
Parse = Generator[None, str | None, T]
_WHITE = " \t\n\r"


@dataclass(frozen=True)
class CallDelta:
    """New text, or a part of call ``index``.

    The first part of a call has ``id`` and ``name``; the other parts have arguments.
    """

    text: str = ""
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""


class NotACall(Exception):
    """The text is not a call, or not a valid call."""


class CharReader:
    """Base of all formats' parsers: reads characters and JSON values, emits text."""

    def __init__(self) -> None:
        self._deltas: list[CallDelta] = []
        self._pending_space: list[str] = []  # trailing white space of the text, which is dropped if a call follows
        self._pushed_back: list[str] = []  # characters to read again; the next character is the last element
        self._raw: list[str] | None = None  # characters of a possible call, emitted as text if there is no call
        self._ended = False

    # ---- JSON -----------------------------------------------------------------------------------------------

    def _value(self, put: Callable[[str], None]) -> Parse[None]:
        """Parse a JSON value. ``put`` gets the source of the value, the text of a string, or ``{}`` for null."""
        character = yield from self._next_nonspace()
        if character == '"':
            put((yield from self._string()))
            return
        if character is None or character in ",:}]":
            raise NotACall
        if character not in "{[":
            self._push(character)
            text = ""
            while (character := (yield from self._next())) is not None and character not in ",}]" + _WHITE:
                text += character
            if character is None:
                raise NotACall
            self._push(character)
            put("{}" if text == "null" else text)
            return
        depth, quoted, escaped = 1, False, False
        put(character)
        while depth:
            character = yield from self._next()
            if character is None:
                raise NotACall
            put(character)
            if escaped:
                escaped = False
            elif quoted:
                escaped, quoted = character == "\\", character != '"'
            elif character == '"':
                quoted = True
            else:
                depth += (character in "{[") - (character in "}]")

    def _string(self) -> Parse[str]:
        """Parse a string after its opening quote, and return its text."""
        raw, escaped = "", False
        while True:
            character = yield from self._next()
            if character is None:
                raise NotACall
            if character == '"' and not escaped:
                break
            raw += character
            escaped = character == "\\" and not escaped
        try:
            text: str = json.loads(f'"{raw}"', strict=False)
            text.encode()  # raises for half a surrogate pair
        except ValueError:
            raise NotACall from None
        return text

    # ---- characters -----------------------------------------------------------------------------------------

    def _next(self) -> Parse[str | None]:
        if self._pushed_back:
            character: str | None = self._pushed_back.pop()
        elif self._ended:
            return None
        else:
            character = yield
        if character is None:
            self._ended = True
        elif self._raw is not None:
            self._raw.append(character)
        return character

    def _push(self, text: str) -> None:
        """Push characters back, so that they are read again."""
        self._pushed_back.extend(reversed(text))
        if self._raw is not None:
            del self._raw[len(self._raw) - len(text) :]

    def _next_nonspace(self) -> Parse[str | None]:
        """Return the next character that is not white space."""
        while True:
            character = yield from self._next()
            if character is None or character not in _WHITE:
                return character

    def _optional(self, text: str) -> Parse[None]:
        """Skip ``text`` if it follows, after optional white space."""
        white, read = yield from self._match_any(text)
        if read != text:
            self._push(white + read)

    def _match_any(self, *texts: str) -> Parse[tuple[str, str]]:
        """Match one of ``texts`` after optional white space.

        Returns the white space and the characters after it: the matched text, or the characters that exclude a match.
        """
        white, read = yield from self._white_before()
        while read not in texts and any(text.startswith(read) for text in texts):
            character = yield from self._next()
            if character is None:
                break
            read += character
        return white, read

    def _white_before(self) -> Parse[tuple[str, str]]:
        """Return white space, and the character after it (empty at the end of the text)."""
        white: list[str] = []
        while (character := (yield from self._next())) is not None and character in _WHITE:
            white.append(character)
        return "".join(white), character or ""

    def _expect(self, text: str) -> Parse[None]:
        """Skip ``text``, which must follow after optional white space. Raises NotACall."""
        first = yield from self._next_nonspace()
        for i, wanted in enumerate(text):
            if (first if not i else (yield from self._next())) != wanted:
                raise NotACall

    def _skip(self, end: str, begin: str) -> Parse[None]:
        """Skip everything up to and including ``end``.

        If ``end`` is missing, emit the text before ``begin``, or all text if ``begin`` is missing, too. Emit nothing if
        the text is a truncated ``end``.
        """
        dropped: list[str] = []
        found = yield from self._text_before(end, begin, say=dropped.append)
        if found == end:
            return
        text = "".join(dropped)
        self._push(found)
        if not end.startswith(text.strip(_WHITE + "}")):
            self._emit_text(text)

    def _text_before(self, *markers: str, say: Callable[[str], None] | None = None) -> Parse[str]:
        """Emit text up to one of the markers. Skip and return the marker; return "" at the end of the answer."""
        say = self._emit_text if say is None else say
        held = ""
        while (character := (yield from self._next())) is not None:
            held += character
            found = next((marker for marker in markers if held.endswith(marker)), "")
            if found:
                say(held[: -len(found)])
                return found
            kept = max(_partial_match(held, marker) for marker in markers)
            say(held[: len(held) - kept])
            held = held[len(held) - kept :]
        say(held)
        return ""

    def _emit_text(self, text: str) -> None:
        """Emit text, but keep its trailing white space until more text follows."""
        solid = text.rstrip()
        if solid:
            self._deltas.append(CallDelta("".join(self._pending_space) + solid))
            self._pending_space = []
        if len(solid) < len(text):
            self._pending_space.append(text[len(solid) :])

    def _take_deltas(self) -> list[CallDelta]:
        """Return the new deltas; adjacent deltas of the same text or call are merged."""
        merged: list[CallDelta] = []
        for delta in self._deltas:
            last = merged[-1] if merged else None
            if last is not None and last.index == delta.index and not delta.name:
                arguments = last.arguments + delta.arguments
                merged[-1] = CallDelta(last.text + delta.text, last.index, last.id, last.name, arguments)
            else:
                merged.append(delta)
        self._deltas = []
        return merged


def _partial_match(text: str, marker: str) -> int:
    """Length of the longest proper prefix of a marker at the end of a text."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
