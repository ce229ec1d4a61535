"""Span types of the daemon, independent of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from kvsidecar.errors import Context

Span = AbstractContextManager[object]
CallSpan = Callable[[str, Context], Span]
"""Opens a span around an RPC of a method; None in a daemon that does not trace."""
WorkSpan = Callable[[str], Span]
"""Opens a span around a named part of a call."""
NOOP_SPAN: Span = nullcontext()


def noop_work_span(what: str) -> Span:
    """Return a span that records nothing."""
    return NOOP_SPAN
