"""Parses durations such as ``12h``."""

from __future__ import annotations

import re

_PATTERN = re.compile(r"(\d{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> int:
    """Parse ``"12h"`` to 43200 seconds. Raises ValueError."""
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no time; write it like 7d, 12h, 30m or 45s")
    return int(found[1]) * _SECONDS[found[2]]
