"""Spans of a request on its way through the processes, without a word about who keeps them, and W3C Trace Context.

``telemetry.otlp_export`` has those that OpenTelemetry keeps; these here are for processes that do not trace, and
cost nothing. Times are ``time.perf_counter``'s, in seconds. https://www.w3.org/TR/trace-context/
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
    """What is told of an error: its text may hold what is nobody's business."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return Cancelled.reason
    if isinstance(error, grpc.RpcError):
        return from_rpc(error).reason
    return str(getattr(error, "reason", type(error).__name__))


class Span:
    """A piece of work; as a context manager it ends with its block, and with the error that leaves it. Any thread may
    use it."""

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
        """Begins a call of another process, which ``metadata`` is to go with."""
        return self

    def metadata(self) -> Metadata:
        """What tells another process that it works for this span."""
        return ()

    def phase(self, name: str, began: float, ended: float) -> None:
        """A part of the work that is over."""

    def part(self, name: str, began: float) -> AbstractContextManager[object]:
        """A part that ends with the block, and in it is the thread's active span."""
        return nullcontext()

    def event(self, name: str) -> None:
        """Something happened, now."""

    def note(self, attributes: Attributes) -> None:
        """What the work was about: sizes and outcomes, never texts, tokens, salts or hashes."""

    def fail(self, error: BaseException) -> None:
        """It failed, or was given up. Of the error only its name is kept."""

    def end(self) -> None:
        """The work is done."""


NOT_TRACED = Span()


class Tracer:
    """Begins the spans of a process."""

    def serve(self, name: str, sent: Iterable[tuple[str, str | bytes]], attributes: Attributes) -> Span:
        """A request begins, under the span that its sender names among headers or metadata."""
        return NOT_TRACED


NO_TRACER = Tracer()


def context_metadata() -> Metadata:
    """The active span, as metadata for a call. Nothing in a process that has not loaded OpenTelemetry's SDK: there are
    no spans in it, and calls cost what they did."""
    if SDK not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    named: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(named)  # nothing without an active span
    return tuple(named.items())
