"""Where a JSON text stands, byte by byte, and what it may not become there.

A state is a value: stepping makes another one, so that many ways on can be looked at from one place. It goes by the
grammar's word that the text is JSON. In an array without duplicates every item that is begun has rivals, the finished
ones that it may still turn out to be equal to; a byte that no rival has drops it, and an item that ends with one left
is a duplicate. What is equal is said by JSON Schema (section 4.2.2): numbers by their value, strings by what escapes
mean, objects whatever their order.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from enum import Enum, auto
from typing import Any, NamedTuple

from inference_svc.unique.places import Place

WHITESPACE = frozenset(b" \t\r\n")
QUOTE, BACKSLASH = ord('"'), ord("\\")
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT, _COMMA, _COLON = b"[]{},:"
_ESCAPE, _SURROGATES = 6, 12  # bytes of \uXXXX, and of two of them
_MOST_DIGITS = 4000  # int() of more is refused
# A depth of arrays, and a finished item of the array there.
Rival = tuple[int, int]
Rivals = dict[Rival, Any]
_NONE: Rivals = {}


class Mode(Enum):
    """What comes next, or is being written."""

    VALUE = auto()
    FIRST = auto()  # a value, or the end of an empty array
    KEY = auto()  # a name, or the end of an object
    COLON = auto()
    AFTER = auto()  # behind a value
    STRING = auto()
    NAME = auto()
    NUMBER = auto()
    WORD = auto()


WRITTEN = (Mode.STRING, Mode.NAME, Mode.NUMBER, Mode.WORD)


class Word(Enum):
    TRUE, FALSE, NULL = b"true", b"false", b"null"


_WORDS = {word.value[0]: word for word in Word}


class Number:
    """Equal to another one by its exact value, or by the one that most readers of JSON give it."""

    __slots__ = ("_exact", "_read")
    __hash__ = None  # type: ignore[assignment]  # equality is not transitive

    def __init__(self, text: bytes) -> None:
        shown = text.decode()
        whole = shown.lstrip("-").isdecimal() and len(shown) <= _MOST_DIGITS
        self._read = int(shown) if whole else float(shown)
        try:
            self._exact = Decimal(shown)
        except InvalidOperation:  # its exponent has more digits than any number of things
            self._exact = Decimal(self._read)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and (self._read == other._read or self._exact == other._exact)

    @property
    def negative(self) -> bool:
        """It is written with a minus, or is 0, which may be."""
        return self._exact.is_signed() or not self._exact

    @property
    def positive(self) -> bool:
        return not self._exact.is_signed() or not self._exact


class Frame(NamedTuple):
    """An open array or object."""

    parent: Frame | None
    place: Place
    listed: bool  # an array
    depth: int
    kept: bool  # it is, or is part of, an item whose value counts
    size: int  # finished items or members
    parts: Any  # where it is kept or unique, their values: a tuple, or a dict by name
    name: bytes  # in an object, of the member whose value is written
    opened: Rivals  # when it was opened
    rivals: Rivals  # those whose parts are equal so far

    @property
    def keeping(self) -> bool:
        """The values of its parts are wanted."""
        return self.kept or (self.listed and self.place.unique)


class Scan(NamedTuple):
    """A state. ``rivals`` are values that what is being written may still become: the value, or the open container."""

    mode: Mode
    top: Frame | None
    place: Place | None  # of the value; of the container behind one
    rivals: Rivals = _NONE
    text: bytes = b""  # of a number or a word, what is written; of a string, an escape that has not ended
    read: bytes = b""  # of a name, or a string that counts, what it means so far: UTF-8, halves of pairs too
    length: int = 0  # bytes of what it means so far
    fresh: bool = False  # an item is to come, whose rivals are also all that are finished

    @property
    def threatened(self) -> bool:
        """What is being written may become a duplicate yet: an empty array too, by ending."""
        if self.rivals or self.fresh:
            return True
        return self.mode is Mode.FIRST and self.top is not None and bool(self.top.rivals)

    @property
    def inside(self) -> bool:
        """Within an array without duplicates."""
        return self.top is not None and self.top.keeping

    @property
    def begins_item(self) -> bool:
        """Nothing is written yet of an item of an array without duplicates."""
        top = self.top
        return self.mode in (Mode.VALUE, Mode.FIRST) and top is not None and top.listed and top.place.unique

    @property
    def only_own(self) -> bool:
        """All rivals are items of the array that is open, which is itself no rival's equal so far."""
        return self.top is not None and not self.top.rivals


def start(place: Place) -> Scan:
    """Before a text that stands at a place."""
    return Scan(Mode.VALUE, None, place)


def follow(state: Scan, text: bytes) -> Scan | None:
    """The state behind some bytes, or None where an item became a duplicate."""
    for byte in text:
        after = step(state, byte)
        if after is None:
            return None
        state = after
    return state


def step(s: Scan, byte: int) -> Scan | None:
    """The state behind one byte more, or None where an item became a duplicate with it."""
    match s.mode:
        case Mode.STRING | Mode.NAME:
            return _in_string(s, byte)
        case Mode.VALUE | Mode.FIRST:
            return s if byte in WHITESPACE else _begun(s, byte)
        case Mode.NUMBER:
            if byte in b"0123456789.eE+-":
                return s._replace(text=s.text + bytes((byte,)))
            number = Number(s.text)
            ended = _finish(s.top, number, {rival: v for rival, v in s.rivals.items() if v == number})
            return None if ended is None else step(ended, byte)
        case Mode.WORD:
            text = s.text + bytes((byte,))
            word = _WORDS[text[0]]
            return _finish(s.top, word, s.rivals) if text == word.value else s._replace(text=text)
        case Mode.KEY:
            if byte == QUOTE:
                return s._replace(mode=Mode.NAME, text=b"", read=b"", length=0)
        case Mode.COLON:
            if byte == _COLON:
                return _member(s)
        case Mode.AFTER:
            if byte == _COMMA and s.top is not None:
                return _item(s.top) if s.top.listed else Scan(Mode.KEY, s.top, s.place, s.top.rivals)
    if byte in (_CLOSE_LIST, _CLOSE_OBJECT) and s.top is not None:
        return _closed(s.top)
    return s


def _begun(s: Scan, byte: int) -> Scan | None:
    """A value's first byte."""
    if byte == _CLOSE_LIST and s.top is not None:
        return _closed(s.top)
    if s.fresh and s.top is not None:
        s = s._replace(rivals={**s.rivals, **{(s.top.depth, i): v for i, v in enumerate(s.top.parts)}})
    if byte == QUOTE:
        return Scan(Mode.STRING, s.top, s.place, _of_kind(s.rivals, bytes))
    if byte in (_OPEN_LIST, _OPEN_OBJECT):
        assert s.place is not None
        listed = byte == _OPEN_LIST
        rivals = _of_kind(s.rivals, tuple if listed else dict)
        depth = 0 if s.top is None else s.top.depth + 1
        frame = Frame(s.top, s.place, listed, depth, s.inside, 0, () if listed else {}, b"", rivals, rivals)
        return _item(frame)._replace(mode=Mode.FIRST) if listed else Scan(Mode.KEY, frame, s.place, rivals)
    word = _WORDS.get(byte)
    if word is not None:
        rivals = {rival: v for rival, v in s.rivals.items() if v is word}
        return Scan(Mode.WORD, s.top, s.place, rivals, bytes((byte,)))
    minus = byte == ord("-")
    rivals = {r: v for r, v in s.rivals.items() if isinstance(v, Number) and (v.negative if minus else v.positive)}
    return Scan(Mode.NUMBER, s.top, s.place, rivals, bytes((byte,)))


def _of_kind(rivals: Rivals, kind: type) -> Rivals:
    return {rival: value for rival, value in rivals.items() if isinstance(value, kind)} if rivals else _NONE


def _item(frame: Frame) -> Scan:
    """The next item of an array is to come."""
    rivals = {rival: v[frame.size] for rival, v in frame.rivals.items() if len(v) > frame.size}
    fresh = frame.place.unique and bool(frame.parts)
    return Scan(Mode.VALUE, frame, frame.place.item(frame.size), rivals, fresh=fresh)


def _member(s: Scan) -> Scan:
    """A name is written, and its value is to come."""
    frame, name = s.top, s.read
    assert frame is not None
    if frame.kept and name in frame.parts:  # the last one counts: what the first one had dropped may be equal yet
        others = {key: v for key, v in frame.parts.items() if key != name}
        rivals = {r: v for r, v in frame.opened.items() if all(k in v and v[k] == o for k, o in others.items())}
        frame = frame._replace(rivals=rivals)
    values = {rival: v[name] for rival, v in frame.rivals.items() if name in v}
    place = frame.place.key(name.decode("utf-8", "surrogatepass"))
    return Scan(Mode.VALUE, frame._replace(name=name), place, values)


def _closed(frame: Frame) -> Scan | None:
    size = frame.size if frame.listed or not frame.kept else len(frame.parts)
    return _finish(frame.parent, frame.parts, {rival: v for rival, v in frame.rivals.items() if len(v) == size})


def _finish(frame: Frame | None, value: Any, equal: Rivals) -> Scan | None:
    """A value ended in a container, equal to these rivals. None when that makes it a duplicate."""
    if frame is None:
        return Scan(Mode.AFTER, None, None)
    if frame.listed and frame.place.unique and any(depth == frame.depth for depth, _ in equal):
        return None
    rivals = {rival: frame.rivals[rival] for rival in equal} if equal else _NONE
    parts = frame.parts
    if frame.keeping:
        parts = (*parts, value) if frame.listed else {**parts, frame.name: value}
    frame = frame._replace(size=frame.size + 1, parts=parts, rivals=rivals)
    return Scan(Mode.AFTER, frame, frame.place, rivals)


def _in_string(s: Scan, byte: int) -> Scan | None:
    if s.text:
        return _in_escape(s, byte)
    if byte == BACKSLASH:
        return s._replace(text=b"\\")
    if byte != QUOTE:
        return _meaning(s, bytes((byte,)))
    if s.mode is Mode.NAME:
        return s._replace(mode=Mode.COLON)
    return _finish(s.top, s.read, {rival: v for rival, v in s.rivals.items() if len(v) == s.length})


def _in_escape(s: Scan, byte: int) -> Scan | None:
    text = s.text
    if len(text) == _ESCAPE and byte != BACKSLASH:  # half of a pair, and no other half
        return _in_string(_meaning(s, _meant(text)), byte)
    text += bytes((byte,))
    if len(text) == _SURROGATES and _is_high(text[_ESCAPE:]):
        return _meaning(s, _meant(text[:_ESCAPE]))._replace(text=text[_ESCAPE:])
    begun = text[_ESCAPE:] if len(text) > _ESCAPE else text
    short = len(begun) == 2 and begun[1] != ord("u")
    if short or len(text) == _SURROGATES or (len(text) == _ESCAPE and not _is_high(text)):
        return _meaning(s, _meant(text))
    return s._replace(text=text)


def _is_high(escape: bytes) -> bool:
    """It is the first half of a pair."""
    return 0xD800 <= int(escape[2:], 16) < 0xDC00


def _meant(escapes: bytes) -> bytes:
    return str(json.loads(b'"' + escapes + b'"')).encode("utf-8", "surrogatepass")


def _meaning(s: Scan, piece: bytes) -> Scan:
    """A string goes on with what stands for these bytes."""
    rivals, read, end = s.rivals, s.read, s.length + len(piece)
    if s.mode is Mode.NAME or s.inside:
        read += piece
    if rivals and s.mode is Mode.NAME:
        rivals = {rival: v for rival, v in rivals.items() if any(name.startswith(read) for name in v)}
    elif rivals:
        rivals = {rival: v for rival, v in rivals.items() if v[s.length : end] == piece}
    return s._replace(rivals=rivals, text=b"", read=read, length=end)
