"""A request's body, read no further than is allowed."""

from __future__ import annotations

import asyncio
import json
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
        return raw, json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is {error.object[error.start]:#x}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


async def _read(request: Request, most_bytes: int) -> bytes:
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise InvalidRequest(f"the body is larger than the {most_bytes} bytes allowed")
        parts.append(part)
    return b"".join(parts)
