"""Connections to clients: HTTP/1.1 to the letter, with deadlines for receiving and for sending.

uvicorn bounds how long a connection waits for its next request while not a byte of that has come. A client that never
sends its first one, sends a head byte by byte, or never reads what it asked for, would keep a descriptor for ever.
"""

from __future__ import annotations

import asyncio
import re
import resource
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import h11
import structlog
from prometheus_client import Counter
from uvicorn.protocols.http.h11_impl import H11Protocol

RESERVED = "reserved"
"""In a request's state: its connection is one of those that are kept for health checks."""
# Connections of the reserve, and descriptors for all else that the process opens.
_RESERVE, _OTHERS = 32, 64
_RESERVED_SECONDS = 5.0
# A client that sends so many requests without waiting for an answer is not a browser, nor any library we know of.
MAX_PIPELINED = 16
_PROGRESS_BYTES = 64 << 10
_CHECKS = 4  # within the time that a client has for so many
_BARE_LF = re.compile(rb"(?<!\r)\n")

log = structlog.get_logger("gateway")


@dataclass
class ConnectionLimits:
    """Limits of one gateway's connections. ``refused`` counts those that are closed for one, by the limit's name; a
    log line of each name is written once a second at most."""

    receive_seconds: float
    send_seconds: float
    refused: Counter
    max_connections: int
    _logged: dict[str, float] = field(default_factory=dict)

    def refuse(self, limit: str, unread_bytes: int) -> None:
        """Counts and logs a connection that is closed for a limit."""
        self.refused.labels(limit).inc()
        now = time.monotonic()
        if now - self._logged.get(limit, -1.0) >= 1:
            self._logged[limit] = now
            log.warning("a connection was closed for its client's doing", limit=limit, unread_bytes=unread_bytes)


def max_connections(descriptors_each: int) -> int:
    """How many connections the descriptor limit holds beside the reserve, where each needs so many descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - _RESERVE - _OTHERS) // descriptors_each)


class _StrictConnection(h11.Connection):
    """h11's parser, without what it takes and RFC 9112 lets a server refuse: line ends of LF alone, and a length
    beside a transfer coding. A proxy in front may read either in another way, and one request as two."""

    def next_event(self) -> Any:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        before = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Request):
            head = before[: len(before) - len(self.trailing_data[0])]
            if _BARE_LF.search(head):
                raise h11.RemoteProtocolError("a line of the head ends with LF alone")
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("the request has Content-Length and Transfer-Encoding")
        return event


class _CountingTransport:
    """A transport that knows how many bytes it was given."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_written = 0

    def write(self, data: bytes) -> None:
        self.num_written += len(data)
        self._transport.write(data)

    @property
    def pending(self) -> int:
        return self._transport.get_write_buffer_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Bounded(H11Protocol):
    """uvicorn's protocol with ``limits``.

    While no request is being answered, a whole head must come within ``receive_seconds``. While bytes wait for the
    client, it must take ``_PROGRESS_BYTES`` of them, or all, in every ``send_seconds``. The second deadline holds to
    the end of the connection, also where that is closed and only its last bytes wait.
    """

    limits: ClassVar[ConnectionLimits]
    num_open: ClassVar[int] = 0
    _due: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _reserved = _counted = False
    _pipelined = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _StrictConnection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        kind = type(self)
        kind.num_open += 1
        self._counted = True
        self._watched = _CountingTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._watched))
        self._reserved = kind.num_open > self.limits.max_connections
        if self._reserved:
            self.app_state = self.app_state | {RESERVED: True}
            self.timeout_keep_alive = 0
            if kind.num_open > self.limits.max_connections + _RESERVE:
                self._end("connections")
                return
        self._check_progress(self.loop.time(), 0, 0)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        another = self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > 0
        self._pipelined = self._pipelined + 1 if another else 0
        if self._pipelined >= MAX_PIPELINED and not self.transport.is_closing():
            self.limits.refuse("pipelined", self._watched.pending)
            self.transport.close()
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted:
            type(self).num_open -= 1
            self._counted = False
        self._forget()
        if self._sending is not None:
            self._sending.cancel()
        super().connection_lost(exc)

    @property
    def _send_seconds(self) -> float:
        return min(_RESERVED_SECONDS, self.limits.send_seconds) if self._reserved else self.limits.send_seconds

    @property
    def _receive_seconds(self) -> float:
        return min(_RESERVED_SECONDS, self.limits.receive_seconds) if self._reserved else self.limits.receive_seconds

    def _look(self) -> None:
        """While no request is being answered the time runs, from the first moment on."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._due is None and not self.transport.is_closing():
            self._due = self.loop.call_later(self._receive_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _check_progress(self, since: float, sent_then: int, pending_then: int) -> None:
        """Ends a connection whose client has taken too little since a time, when so many bytes were sent and waited."""
        now, pending = self.loop.time(), self._watched.pending
        sent = self._watched.num_written - pending
        if sent - sent_then >= min(pending_then, _PROGRESS_BYTES):
            since, sent_then, pending_then = now, sent, pending
        elif now - since >= self._send_seconds:
            self._end("unread")
            return
        wait = self._send_seconds / _CHECKS
        self._sending = self.loop.call_later(wait, self._check_progress, since, sent_then, pending_then)

    def _end(self, limit: str) -> None:
        """Closes at once, without what still waits."""
        self.limits.refuse(limit, self._watched.pending)
        self.transport.abort()


def bounded(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP/1.1 within ``limits``, whose connections are counted together."""
    return type("Bounded", (_Bounded,), {"limits": limits})
