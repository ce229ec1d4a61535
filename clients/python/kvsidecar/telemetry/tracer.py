"""Tracing interface (spans, tracers, W3C Trace Context), with a no-op implementation.

``telemetry.otel_export`` implements it with OpenTelemetry; the classes here do nothing, for processes that do not
trace. Times are those of ``time.perf_counter``, in seconds. https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import grpc

from kvsidecar.errors import Cancelled, from_rpc

SDK = "opentelemetry.sdk.trace"
Attributes = Mapping[str, str | int | float | bool]
Metadata = tuple[tuple[str, str], ...]


def error_name(error: BaseException) -> str:
    """Return an error's name for a span, because the error's text may be private."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return Cancelled.reason
    if isinstance(error, grpc.RpcError):
        return from_rpc(error).reason
    return str(getattr(error, "reason", type(error).__name__))


class Span:
    """A unit of work. Thread-safe.

    As a context manager it ends with its ``with`` block, and records the block's exception.
    """

    began = 0.0

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.end()

    def call(self, name: str) -> Span:
        """Start a child span for a call to another process; send its ``metadata`` with the call."""
        return self

    def metadata(self) -> Metadata:
        """Return the metadata that makes another process's spans children of this one."""
        return ()

    def phase(self, name: str, began: float, ended: float) -> None:
        """Record a finished child span."""

    def part(self, name: str, began: float) -> AbstractContextManager[object]:
        """Open a child span that is the thread's active span in the block."""
        return nullcontext()

    def event(self, name: str) -> None:
        """Record an event at the current time."""

    def note(self, attributes: Attributes) -> None:
        """Set attributes: sizes and outcomes, never texts, tokens, salts or hashes."""

    def fail(self, error: BaseException) -> None:
        """Record a failure or cancellation; keeps only the error's name."""

    def end(self) -> None:
        """End the span."""


NOOP_SPAN = Span()


class Tracer:
    """Starts the spans of a process."""

    def serve(self, name: str, sent: Iterable[tuple[str, str | bytes]], attributes: Attributes) -> Span:
        """Start a request's span, as a child of the span in the request's headers or metadata."""
        return NOOP_SPAN


NOOP_TRACER = Tracer()


def context_metadata() -> Metadata:
    """Return the active span as metadata for a call.

    The metadata is empty in a process that has not loaded OpenTelemetry's SDK: such a process has no spans, and its
    calls have no overhead.
    """
    if SDK not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    named: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(named)  # nothing without an active span
    return tuple(named.items())
