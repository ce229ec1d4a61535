"""Parses and formats byte counts such as ``512MiB``."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse ``"512MiB"`` to 536870912. Raises ValueError."""
    found = _PATTERN.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a size; write it like 512MiB, 8GiB or 1000000")
    number, unit = found.groups()
    return int(float(number) * (_UNITS | _BINARY)[(unit or "").lower()])


def format_size(size_bytes: float) -> str:
    """Format 536870912 as ``"512.0 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
