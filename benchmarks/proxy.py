"""TCP proxy that forwards a local port to a server, and injects faults on command."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class Proxy:
    """Forwards connections to the port ``target`` of ``host``, on its own threads.

    A fault applies to open and new connections until ``go_on`` resets it.
    """

    target: int
    port: int = field(init=False)
    delay_seconds: float = 0.0  # delay of each piece of data from the server
    garbage: bool = False  # replace the server's data by random bytes
    host: str = "127.0.0.1"
    _open: set[socket.socket] = field(default_factory=set)
    _flowing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False
    refusing: bool = False

    def __post_init__(self) -> None:
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    # ---- faults ---------------------------------------------------------------------------------------------

    def hang(self) -> None:
        """Forward no data; connections stay open."""
        self._flowing.clear()

    def go_on(self) -> None:
        """Reset all faults."""
        self.delay_seconds, self.garbage, self.refusing = 0.0, False, False
        self._flowing.set()

    def cut(self) -> None:
        """Close all connections, and close each new connection at once."""
        self.refusing = True
        with self._lock:
            gone, self._open = self._open, set()
        for one in gone:
            _end(one)

    def close(self) -> None:
        self._ended = True
        self.cut()
        self._flowing.set()
        _end(self._listener)
        self._thread.join(5)

    # ---- forwarding -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                _end(near)
                continue
            try:
                far = socket.create_connection((self.host, self.target), timeout=5)
            except OSError:
                _end(near)
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                if answers and self.delay_seconds:
                    threading.Event().wait(self.delay_seconds)
                if answers and self.garbage:
                    data = os.urandom(len(data))
                sink.sendall(data)
        for one in (source, sink):
            with self._lock:
                self._open.discard(one)
            _end(one)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
