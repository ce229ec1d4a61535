"""Connections that are held for requests alone: one on which no request begins in time is closed.

uvicorn bounds how long a connection waits for its next request while not a byte of that has come; a client that never
sends its first one, or sends a head byte by byte, would keep a descriptor for ever.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class _Bounded(H11Protocol):
    seconds: ClassVar[float]
    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _look(self) -> None:
        """While no request is being answered the time runs, from the first moment on."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._due is None and not self.transport.is_closing():
            self._due = self.loop.call_later(self.seconds, self.transport.close)

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def bounded(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP/1.1, with connections that a request's whole head must have come by within
    ``seconds`` of their beginning, or of the answer before."""
    return type("Bounded", (_Bounded,), {"seconds": seconds})
