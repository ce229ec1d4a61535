"""Limit of a page: how many items a listing returns."""

from __future__ import annotations

from collections.abc import Mapping

from kvsidecar.errors import InvalidRequest


def page_limit(asked: Mapping[str, str], default: int, most: int) -> int:
    """Return the ``limit`` of a query. Raises InvalidRequest if it is not 1 to ``most``."""
    limit = asked.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise InvalidRequest(f"limit is {limit[:40]!r}; allowed are 1 to {most}", param="limit")
    return int(limit)
