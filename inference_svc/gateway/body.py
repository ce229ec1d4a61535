"""A request's body, read no further than is allowed."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from kvsidecar.errors import InvalidRequest


async def read_json(request: Request, most_bytes: int) -> tuple[bytes, Any]:
    """The bytes, and what they say. Raises InvalidRequest."""
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise InvalidRequest(f"the body is larger than the {most_bytes} bytes allowed")
        parts.append(part)
    raw = b"".join(parts)
    try:
        return raw, json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is {error.object[error.start]:#x}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
