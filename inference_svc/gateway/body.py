"""A request's body, read no further than is allowed."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from fastapi import Request
from kvsidecar.errors import InvalidRequest


async def read_json(request: Request, most_bytes: int, within_seconds: float) -> tuple[bytes, Any]:
    """The bytes, and what they say. Raises InvalidRequest, also for a body that is not there in time."""
    try:
        async with asyncio.timeout(within_seconds):
            raw = await _read(request, most_bytes)
    except TimeoutError as error:
        raise InvalidRequest(f"the body did not come within {within_seconds:g} s") from error
    try:
        return raw, json.loads(raw.decode("utf-8"), parse_constant=_refused, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is {error.object[error.start]:#x}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _refused(word: str) -> float:
    raise ValueError(f"{word} is no number there")


def _finite(text: str) -> float:
    """Infinity has no JSON, in which some of a body comes back."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


async def _read(request: Request, most_bytes: int) -> bytes:
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise InvalidRequest(f"the body is larger than the {most_bytes} bytes allowed")
        parts.append(part)
    return b"".join(parts)
