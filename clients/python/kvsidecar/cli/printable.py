"""Removes terminal control characters from text of models and other users."""

from __future__ import annotations

from typing import TextIO

# C0 except newline and tab, DEL, and C1, which terminals also interpret as control sequences.
_CONTROL = dict.fromkeys([n for n in (*range(0x20), *range(0x7F, 0xA0)) if chr(n) not in "\n\t"])


def printable(text: str) -> str:
    """Remove control characters except newlines and tabs.

    A control sequence could, for example, write to the clipboard.
    """
    return text.translate(_CONTROL)


def for_stream(text: str, stream: TextIO) -> str:
    """Return the text for a stream: a terminal gets no control characters, a file the text as it is."""
    return printable(text) if stream.isatty() else text
