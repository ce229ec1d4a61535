"""When the time of stored chunks is over: a note of each that has an end, Unix milliseconds as uint64 little-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

EXPIRY_NOTE_PREFIX = b"kept-until:"
_MILLISECONDS = struct.Struct("<Q")


def encode_expiry(until: float) -> bytes:
    """The note of a finite end, in Unix seconds."""
    return _MILLISECONDS.pack(int(until * 1000))


def decode_expiry(note: bytes) -> float | None:
    """The end that a note names, in Unix seconds; None when it is no note."""
    return _MILLISECONDS.unpack(note)[0] / 1000 if len(note) == _MILLISECONDS.size else None


def ends(notes: Mapping[bytes, bytes]) -> dict[bytes, int]:
    """The ends that notes name, in Unix milliseconds, by prefix hash."""
    return {
        name.removeprefix(EXPIRY_NOTE_PREFIX): _MILLISECONDS.unpack(note)[0]
        for name, note in notes.items()
        if name.startswith(EXPIRY_NOTE_PREFIX) and len(note) == _MILLISECONDS.size
    }


def merge_expiries(
    asked: Iterable[tuple[bytes, int]], stored: frozenset[bytes], notes: Mapping[bytes, bytes]
) -> dict[bytes, bytes | None]:
    """The notes that change when chunks come whose time ends then (Unix milliseconds; 0: never): the longest that
    anybody asked for counts, and what is ``stored`` without a note has no end."""
    known, out = ends(notes), dict[bytes, bytes | None]()
    for key, end in asked:
        if not end:
            if key in known:
                out[EXPIRY_NOTE_PREFIX + key] = None
        elif key not in stored or known.get(key, end) < end:
            out[EXPIRY_NOTE_PREFIX + key] = _MILLISECONDS.pack(end)
    return out
