"""OpenAI's ``prompt_cache_*`` options, which are hints: no value of theirs is an error."""

from __future__ import annotations

import re
from typing import Any

from kvsidecar.chunk_layout import MAX_TTL_SECONDS

_LIFETIME = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_KEY_CHARS = 256


def prompt_cache_ttl_seconds(options: Any, retention: Any) -> int | None:
    """Return the TTL that ``prompt_cache_options.ttl`` or ``prompt_cache_retention`` asks for; None without one."""
    given = options.get("ttl") if isinstance(options, dict) else None
    for lifetime in (given, retention):
        found = _LIFETIME.fullmatch(lifetime) if isinstance(lifetime, str) else None
        if found is not None:
            return min(int(found[1]) * _UNIT_SECONDS[found[2]], MAX_TTL_SECONDS)
    return None


def routing_key(key: Any) -> str:
    """Return ``prompt_cache_key`` as a text for routers; empty without one."""
    return key[:_MAX_KEY_CHARS] if isinstance(key, str) else ""
