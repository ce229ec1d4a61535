"""The gRPC channel of one session: its unary calls carry the active span, and calls after its end fail as gRPC errors.

A connection closes its channel when its session ends, and another thread may call at that moment. gRPC then raises
ValueError; with an interceptor (which makes its methods anew for each call), the process crashes. Callers handle
``grpc.RpcError``, as they must for a daemon that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from kvsidecar.telemetry.tracer import context_metadata


class ChannelClosed(grpc.RpcError):
    """A call that was not sent, because its session had ended. Its interface is that of gRPC's own errors."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the session with the cache daemon has ended"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class SessionChannel:
    """Makes the methods of a stub, as a ``grpc.Channel`` does."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *args: Any, **kwargs: Any) -> _UnaryMethod:
        return _UnaryMethod(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> _Method:
        return _Method(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> _Method:
        return _Method(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> _Method:
        return _Method(self._channel.stream_stream(*args, **kwargs))


class _Method:
    """A method of the daemon. A call raises ChannelClosed after the channel was closed."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, request: Any, timeout: float | None = None) -> Any:
        return self._start(self._method, request, timeout)

    def future(self, request: Any, timeout: float | None = None) -> Any:
        """Start a call; its result is awaited later."""
        return self._start(self._method.future, request, timeout)

    def _start(self, start: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        try:
            return start(request, timeout=timeout, metadata=self._metadata())
        except ValueError as error:
            raise ChannelClosed from error

    def _metadata(self) -> Any:
        return None


class _UnaryMethod(_Method):
    """A method whose calls carry the active span (W3C Trace Context)."""

    def _metadata(self) -> Any:
        return context_metadata()
