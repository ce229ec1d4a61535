"""Removes terminal control characters from text of models and other users."""

from __future__ import annotations

# C0 but newline and tab, DEL, and C1, which terminals take for sequences as well.
_CONTROL = dict.fromkeys([n for n in (*range(0x20), *range(0x7F, 0xA0)) if chr(n) not in "\n\t"])


def printable(text: str) -> str:
    """Remove control characters except newlines and tabs: a sequence could write to the clipboard."""
    return text.translate(_CONTROL)
