"""An answer's text, read one character after the other by generators.

A reading asks for a character by ``yield``, and gets None at the end. So what it finds does not depend on the pieces in
which the text came.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
# Asks for characters, of which None is the end, and returns T.
Parse = Generator[None, str | None, T]
_WHITE = " \t\n\r"


@dataclass(frozen=True)
class CallDelta:
    """New text, or a piece of the call ``index``: its ``id`` and ``name`` in the first one, then its arguments."""

    text: str = ""
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""


class NotACall(Exception):
    """This is no call, or goes on as none."""


class CharReader:
    """What readings of all dialects need: characters, text that is passed on, JSON."""

    def __init__(self) -> None:
        self._deltas: list[CallDelta] = []
        self._pending_space: list[str] = []  # at the text's end: it goes when a call follows
        self._pushed_back: list[str] = []  # read too far; the next one last
        self._raw: list[str] | None = None  # what is text after all should it be no call
        self._ended = False

    # ---- JSON -----------------------------------------------------------------------------------------------

    def _value(self, put: Callable[[str], None]) -> Parse[None]:
        """A value, passed on as it is written; of a string its text, of null an empty object."""
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
        """The text of a string whose opening quote was read."""
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
            text.encode()  # half a surrogate pair is none of UTF-8's
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
        """These characters are read again."""
        self._pushed_back.extend(reversed(text))
        if self._raw is not None:
            del self._raw[len(self._raw) - len(text) :]

    def _next_nonspace(self) -> Parse[str | None]:
        """The next character that is not white."""
        while True:
            character = yield from self._next()
            if character is None or character not in _WHITE:
                return character

    def _optional(self, text: str) -> Parse[None]:
        """Reads a text if it follows, after white space or not."""
        white, read = yield from self._match_any(text)
        if read != text:
            self._push(white + read)

    def _match_any(self, *texts: str) -> Parse[tuple[str, str]]:
        """White space, and one of the texts behind it, if one follows: else what was read to see that."""
        white, read = yield from self._white_before()
        while read not in texts and any(text.startswith(read) for text in texts):
            character = yield from self._next()
            if character is None:
                break
            read += character
        return white, read

    def _white_before(self) -> Parse[tuple[str, str]]:
        """White space, and the character behind it, if there is one."""
        white: list[str] = []
        while (character := (yield from self._next())) is not None and character in _WHITE:
            white.append(character)
        return "".join(white), character or ""

    def _expect(self, text: str) -> Parse[None]:
        """Drops a text that must follow, after white space or not. Raises Broken."""
        first = yield from self._next_nonspace()
        for i, wanted in enumerate(text):
            if (first if not i else (yield from self._next())) != wanted:
                raise NotACall

    def _skip(self, end: str, begin: str) -> Parse[None]:
        """Drops all up to and with a text. Where that is missing, what comes before ``begin`` or the end is text,
        but for the beginning of what is missing."""
        dropped: list[str] = []
        found = yield from self._text_before(end, begin, say=dropped.append)
        if found == end:
            return
        text = "".join(dropped)
        self._push(found)
        if not end.startswith(text.strip(_WHITE + "}")):
            self._emit_text(text)

    def _text_before(self, *markers: str, say: Callable[[str], None] | None = None) -> Parse[str]:
        """Passes text on until one of the markers, which is dropped and returned; empty at the end."""
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
        """Passes text on; white space at its end waits for what follows."""
        solid = text.rstrip()
        if solid:
            self._deltas.append(CallDelta("".join(self._pending_space) + solid))
            self._pending_space = []
        if len(solid) < len(text):
            self._pending_space.append(text[len(solid) :])

    def _take_deltas(self) -> list[CallDelta]:
        """What was found, neighbours of a kind as one."""
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
    """Characters at the end of a text that a marker begins with, not all of it."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
