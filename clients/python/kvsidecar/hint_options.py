"""Options of requests with hints for the cache, as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Literal, TypedDict, Unpack

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb


class HintOptions(TypedDict, total=False):
    """Hints about the chunks that a request uses and stores.

    ``cache_ttl_seconds`` is the TTL of these chunks; without it they do not expire. Eviction spares the chunks for at
    least ``cache_retain_seconds``, as far as the tenant's quota allows. A breakpoint gives the first part of the prompt
    its own retention: ``{"messages": 1, "retain_seconds": 3600}`` for the first message, or ``{"tokens": 500,
    "retain_seconds": 3600}`` for the first 500 tokens. ``cache_session`` names an agent or conversation;
    ``release_session`` removes the chunks that only this session uses. Chunks of low priority are evicted first.
    """

    cache_ttl_seconds: int | None
    cache_retain_seconds: int | None
    cache_breakpoints: Sequence[Mapping[str, int]]
    cache_session: str
    cache_priority: Literal["low", "normal"]


def hint_options(**hints: Unpack[HintOptions]) -> pb.CacheOptions:
    """Convert hints. Raises InvalidRequest, and TypeError for an unknown name."""
    if unknown := sorted(hints.keys() - HintOptions.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    for name in ("cache_ttl_seconds", "cache_retain_seconds"):
        check_number(name, hints.get(name))
    session, priority = hints.get("cache_session", ""), hints.get("cache_priority", "normal")
    check_text("cache_session", session)
    if priority not in ("low", "normal"):
        raise InvalidRequest(f"cache_priority is {priority!r}; low and normal are allowed", param="cache_priority")
    return pb.CacheOptions(
        ttl_seconds=hints.get("cache_ttl_seconds"),
        retain_seconds=hints.get("cache_retain_seconds"),
        breakpoints=[_breakpoint(point) for point in hints.get("cache_breakpoints", ())],
        session=session,
        priority=pb.CACHE_PRIORITY_LOW if priority == "low" else pb.CACHE_PRIORITY_UNSPECIFIED,
    )


def _breakpoint(point: Mapping[str, int]) -> pb.CacheBreakpoint:
    names = point.keys()
    if "retain_seconds" not in names or len(names) != 2 or not names <= {"messages", "tokens", "retain_seconds"}:
        raise InvalidRequest(
            f"a breakpoint of cache_breakpoints has {', '.join(map(str, names)) or 'nothing'}; it needs "
            "retain_seconds, and messages or tokens",
            param="cache_breakpoints",
        )
    for name, value in point.items():
        check_number(f"{name} of cache_breakpoints", value)
    return pb.CacheBreakpoint(**point)


def check_number(name: str, value: object, bits: int = 32) -> None:
    """Raise InvalidRequest unless a value is None, or an integer that fits into ``bits``."""
    if value is not None and not (isinstance(value, Integral) and 0 <= int(value) < 1 << bits):
        raise InvalidRequest(f"{name} is {value!r}; allowed are 0 to {(1 << bits) - 1}", param=name)


def check_text(name: str, text: object) -> None:
    """Raise InvalidRequest for what is no text, and for text that UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is of type {type(text).__name__}; text is allowed", param=name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; send whole "
            f"characters",
            param=name,
        ) from None
