"""Spans around the daemon's work. Off, they cost one call of a function that returns a constant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from kvsidecar.errors import Context

Span = AbstractContextManager[object]
CallSpan = Callable[[str, Context], Span]
WorkSpan = Callable[[str], Span]
_NOTHING: Span = nullcontext()


def no_call_span(method: str, context: Context) -> Span:
    """For daemons that do not trace."""
    return _NOTHING


def no_work_span(what: str) -> Span:
    """For daemons that do not trace."""
    return _NOTHING
