"""Tracing spans of HTTP requests, under OpenTelemetry's conventions.

Calls to workers are child spans. https://opentelemetry.io/docs/specs/semconv/http/http-spans/
"""

from __future__ import annotations

from contextvars import ContextVar

from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.telemetry.tracer import NOOP_SPAN, Span, Tracer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SERVICE_NAME = "kvsidecar-gateway"
FIRST_TOKEN = "first token"
GENERATE_STREAM = f"{pb.DESCRIPTOR.services_by_name['InferenceService'].full_name}/GenerateStream"
_TRACED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"})
_current: ContextVar[Span] = ContextVar("span", default=NOOP_SPAN)


def current_span() -> Span:
    """Return the span of the current HTTP request."""
    return _current.get()


class TracingMiddleware:
    """Opens a span for every generating request, and ends it after the last byte of the answer.

    Plain ASGI, for the same reason as ``RequestGuard``.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _TRACED:
            await self._app(scope, receive, send)
            return
        method, route = scope["method"], scope["path"]
        sent = ((key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"])
        attributes = {"http.request.method": method, "http.route": route}
        with self._tracer.serve(f"{method} {route}", sent, attributes) as span:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.note({"http.response.status_code": message["status"]})
                await send(message)

            token = _current.set(span)
            try:
                await self._app(scope, receive, noted)
            finally:
                _current.reset(token)
