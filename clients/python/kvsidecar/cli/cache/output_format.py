"""Formats values for the terminal and for JSON."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import Message

from kvsidecar.cache.v1 import cache_pb2 as pb

# Tokens are private: no command requests them from the daemon for this output.
_CONTENT = "token_ids"


def as_dict(message: Message) -> dict[str, Any]:
    """Convert a message to a dict by field names: integers unchanged, bytes in hex, enums by name.

    Optional values that are absent are None.
    """
    fields = (field for field in message.DESCRIPTOR.fields if field.name != _CONTENT)
    return {field.name: _value(field, message) for field in fields}


def _value(field: Any, of: Message) -> Any:
    value = getattr(of, field.name)
    if field.is_repeated:
        return [as_dict(item) if isinstance(item, Message) else item for item in value]
    if isinstance(value, Message):
        return as_dict(value)
    if field.has_presence and not of.HasField(field.name):
        return None
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value


def print_json(value: Any, *, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent), flush=True)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def duration(seconds: float) -> str:
    """Format 90061 as ``"1d 1h"``: the two largest units."""
    parts: list[str] = []
    left = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join(parts[:2])


def where(chunk: pb.ChunkInfo) -> str:
    """Return the tiers that have a chunk."""
    tiers = (("arena", chunk.resident), ("disk", chunk.durable), ("pinned", chunk.pinned))
    return "+".join(name for name, on in tiers if on)
