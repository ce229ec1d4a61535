"""``cache_control`` of Anthropic's requests, and the TTL that it asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from inference_svc.gateway.body_model import BodyModel

_TTL_SECONDS = {"5m": 300, "1h": 3600}


class CacheControl(BodyModel):
    """A cache breakpoint. ``scope`` has no effect: tenants share nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Any = None


def ttl_seconds(marks: Iterable[CacheControl | None]) -> int | None:
    """Return the longest TTL of a request's breakpoints; None without any, for no expiry."""
    return max((_TTL_SECONDS[mark.ttl or "5m"] for mark in marks if mark is not None), default=None)
