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
Reading = Generator[None, str | None, T]
_WHITE = " \t\n\r"


@dataclass(frozen=True)
class Delta:
    """New text, or a piece of the call ``index``: its ``id`` and ``name`` in the first one, then its arguments."""

    text: str = ""
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""


class Broken(Exception):
    """This is no call, or goes on as none."""


class Characters:
    """What readings of all dialects need: characters, text that is passed on, JSON."""

    def __init__(self) -> None:
        self._found: list[Delta] = []
        self._white: list[str] = []  # at the text's end: it goes when a call follows
        self._back: list[str] = []  # read too far; the next one last
        self._raw: list[str] | None = None  # what is text after all should it be no call
        self._ended = False

    # ---- JSON -----------------------------------------------------------------------------------------------

    def _value(self, put: Callable[[str], None]) -> Reading[None]:
        """A value, passed on as it is written; of a string its text, of null an empty object."""
        character = yield from self._solid()
        if character == '"':
            put((yield from self._string()))
            return
        if character is None or character in ",:}]":
            raise Broken
        if character not in "{[":
            self._push(character)
            text = ""
            while (character := (yield from self._next())) is not None and character not in ",}]" + _WHITE:
                text += character
            if character is None:
                raise Broken
            self._push(character)
            put("{}" if text == "null" else text)
            return
        depth, quoted, escaped = 1, False, False
        put(character)
        while depth:
            character = yield from self._next()
            if character is None:
                raise Broken
            put(character)
            if escaped:
                escaped = False
            elif quoted:
                escaped, quoted = character == "\\", character != '"'
            elif character == '"':
                quoted = True
            else:
                depth += (character in "{[") - (character in "}]")

    def _string(self) -> Reading[str]:
        """The text of a string whose opening quote was read."""
        raw, escaped = "", False
        while True:
            character = yield from self._next()
            if character is None:
                raise Broken
            if character == '"' and not escaped:
                break
            raw += character
            escaped = character == "\\" and not escaped
        try:
            text: str = json.loads(f'"{raw}"', strict=False)
            text.encode()  # half a surrogate pair is none of UTF-8's
        except ValueError:
            raise Broken from None
        return text

    # ---- characters -----------------------------------------------------------------------------------------

    def _next(self) -> Reading[str | None]:
        if self._back:
            character: str | None = self._back.pop()
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
        self._back.extend(reversed(text))
        if self._raw is not None:
            del self._raw[len(self._raw) - len(text) :]

    def _solid(self) -> Reading[str | None]:
        """The next character that is not white."""
        while True:
            character = yield from self._next()
            if character is None or character not in _WHITE:
                return character

    def _optional(self, text: str) -> Reading[None]:
        """Reads a text if it follows, after white space or not."""
        white, read = yield from self._leading(text)
        if read != text:
            self._push(white + read)

    def _leading(self, *texts: str) -> Reading[tuple[str, str]]:
        """White space, and one of the texts behind it, if one follows: else what was read to see that."""
        white, read = yield from self._white_before()
        while read not in texts and any(text.startswith(read) for text in texts):
            character = yield from self._next()
            if character is None:
                break
            read += character
        return white, read

    def _white_before(self) -> Reading[tuple[str, str]]:
        """White space, and the character behind it, if there is one."""
        white: list[str] = []
        while (character := (yield from self._next())) is not None and character in _WHITE:
            white.append(character)
        return "".join(white), character or ""

    def _expected(self, text: str) -> Reading[None]:
        """Drops a text that must follow, after white space or not. Raises Broken."""
        first = yield from self._solid()
        for i, wanted in enumerate(text):
            if (first if not i else (yield from self._next())) != wanted:
                raise Broken

    def _skip(self, end: str, begin: str) -> Reading[None]:
        """Drops all up to and with a text. Where that is missing, what comes before ``begin`` or the end is text,
        but for the beginning of what is missing."""
        dropped: list[str] = []
        found = yield from self._text_before(end, begin, say=dropped.append)
        if found == end:
            return
        text = "".join(dropped)
        self._push(found)
        if not end.startswith(text.strip(_WHITE + "}")):
            self._say(text)

    def _text_before(self, *markers: str, say: Callable[[str], None] | None = None) -> Reading[str]:
        """Passes text on until one of the markers, which is dropped and returned; empty at the end."""
        say = self._say if say is None else say
        held = ""
        while (character := (yield from self._next())) is not None:
            held += character
            found = next((marker for marker in markers if held.endswith(marker)), "")
            if found:
                say(held[: -len(found)])
                return found
            kept = max(_begun(held, marker) for marker in markers)
            say(held[: len(held) - kept])
            held = held[len(held) - kept :]
        say(held)
        return ""

    def _say(self, text: str) -> None:
        """Passes text on; white space at its end waits for what follows."""
        solid = text.rstrip()
        if solid:
            self._found.append(Delta("".join(self._white) + solid))
            self._white = []
        if len(solid) < len(text):
            self._white.append(text[len(solid) :])

    def _take(self) -> list[Delta]:
        """What was found, neighbours of a kind as one."""
        merged: list[Delta] = []
        for delta in self._found:
            last = merged[-1] if merged else None
            if last is not None and last.index == delta.index and not delta.name:
                arguments = last.arguments + delta.arguments
                merged[-1] = Delta(last.text + delta.text, last.index, last.id, last.name, arguments)
            else:
                merged.append(delta)
        self._found = []
        return merged


def _begun(text: str, marker: str) -> int:
    """Characters at the end of a text that a marker begins with, not all of it."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
