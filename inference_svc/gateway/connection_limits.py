"""Client connections: strict HTTP/1.1, with deadlines for receiving and sending.

uvicorn alone bounds only the idle time between two requests of a connection. A client that never sends its first
request, sends a head byte by byte, or never reads its answer would keep a file descriptor forever.
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
"""Key in the state of a request whose connection belongs to the reserve for health checks."""
# The number of connections in the reserve, and of file descriptors for everything that is not a client connection.
_RESERVE, _OTHERS = 32, 64
_RESERVED_SECONDS = 5.0
# No browser and no known library sends this many requests without waiting for an answer.
MAX_PIPELINED = 16
_PROGRESS_BYTES = 64 << 10
_CHECKS = 4  # checks per deadline
_BARE_LF = re.compile(rb"(?<!\r)\n")

log = structlog.get_logger("gateway")


@dataclass
class ConnectionLimits:
    """Limits of one gateway's connections.

    ``refused`` counts the connections that were closed because of a limit, by the limit's name. The log has at most one
    line per second for each name.
    """

    receive_seconds: float
    send_seconds: float
    refused: Counter
    max_connections: int
    _logged: dict[str, float] = field(default_factory=dict)

    def refuse(self, limit: str, unread_bytes: int) -> None:
        """Count and log a connection that is closed because of a limit."""
        self.refused.labels(limit).inc()
        now = time.monotonic()
        if now - self._logged.get(limit, -1.0) >= 1:
            self._logged[limit] = now
            log.warning("closed a connection because of a limit", limit=limit, unread_bytes=unread_bytes)


def max_connections(descriptors_each: int) -> int:
    """Return how many connections the process's descriptor limit allows, the reserve not counted.

    Each connection takes ``descriptors_each`` file descriptors.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - _RESERVE - _OTHERS) // descriptors_each)


class _StrictConnection(h11.Connection):
    """h11's parser, which also refuses two forms of request smuggling (RFC 9112).

    The two forms are bare LF line ends, and Content-Length with a transfer coding. A proxy in front of the gateway may
    parse them differently, and take one request for two.
    """

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
    """A transport that counts the bytes written to it."""

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
    """uvicorn's HTTP/1.1 protocol with ``limits``.

    While the gateway answers no request, a complete head must arrive within ``receive_seconds``. While bytes wait for
    the client, the client must read ``_PROGRESS_BYTES`` of them, or all of them, in every ``send_seconds``. The second
    deadline applies until the last byte is sent, even after the server has closed the connection.
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
        """Start the receive deadline while no request is being answered; stop it during an answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._due is None and not self.transport.is_closing():
            self._due = self.loop.call_later(self._receive_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _check_progress(self, since: float, sent_then: int, pending_then: int) -> None:
        """Abort the connection if its client has read too little since ``since``; otherwise schedule the next check.

        ``since`` is loop time. ``sent_then`` and ``pending_then`` are the sent and pending bytes at that time.
        """
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
        """Abort the connection and discard its pending bytes."""
        self.limits.refuse(limit, self._watched.pending)
        self.transport.abort()


def bounded(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Return a protocol class for one server: it has these limits and counts the server's connections."""
    return type("Bounded", (_Bounded,), {"limits": limits})
