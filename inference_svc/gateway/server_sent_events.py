"""Server-sent events: their encoding, and the response that streams them.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse


def encode_event(data: dict[str, Any] | bytes, name: str = "") -> bytes:
    """Encode one event. ``data`` is an object, or one encoded line; ``name`` is the event's type."""
    if isinstance(data, dict):
        data = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%bdata: %b\n\n" % (f"event: {name}\n".encode() if name else b"", data)


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Return a response of encoded events that no proxy buffers."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
