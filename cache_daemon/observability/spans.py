"""Span types of the daemon, independent of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from kvsidecar.errors import Context

Span = AbstractContextManager[object]
CallSpan = Callable[[str, Context], Span]
"""Around a call of a method; a daemon that does not trace has none."""
WorkSpan = Callable[[str], Span]
"""Around a named part of a call."""
NOOP_SPAN: Span = nullcontext()


def noop_work_span(what: str) -> Span:
    """Return a span that records nothing."""
    return NOOP_SPAN
