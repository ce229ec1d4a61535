"""Sends the active span with calls to the daemon (W3C Trace Context)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import grpc

from kvsidecar.telemetry.tracer import SDK, context_metadata


def with_trace_context(channel: grpc.Channel) -> grpc.Channel:
    """Return a channel whose unary calls carry the active span.

    Returns the channel itself in a process that has not loaded OpenTelemetry's SDK: such a process has no spans, and
    its calls have no overhead.
    """
    return grpc.intercept_channel(channel, _TraceContextInterceptor()) if SDK in sys.modules else channel


class _TraceContextInterceptor(grpc.UnaryUnaryClientInterceptor):
    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        if named := context_metadata():
            metadata = [*(client_call_details.metadata or ()), *named]
            client_call_details = client_call_details._replace(metadata=metadata)
        return continuation(client_call_details, request)
