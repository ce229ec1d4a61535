"""Prometheus endpoint of the daemon: an HTTP server with limits on connections and their duration."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kvsidecar.errors import ConfigurationError
from kvsidecar.telemetry.build_info import BuildInfoCollector
from prometheus_client import CollectorRegistry, make_wsgi_app

from cache_daemon.observability.prometheus_collector import StoreCollector
from cache_daemon.observability.stats_snapshot import StatsSnapshots

MAX_CONNECTIONS = 16
# Idle timeout and maximal duration of a connection.
_IDLE_SECONDS, _MAX_CONNECTION_SECONDS = 5.0, 30.0


class _Silent(WSGIRequestHandler):
    timeout = _IDLE_SECONDS

    def log_message(self, format: str, *values: Any) -> None:
        """Log nothing: scrapes are frequent."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Threaded WSGI server that closes the oldest connection at the limit.

    Idle connections therefore cannot block a scrape.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, application: Callable[..., Any]) -> None:
        """Open the socket. Raises OSError when the address cannot be used."""
        self.address_family = family
        self._open: dict[socket.socket, float] = {}  # opening time of each connection, oldest first
        self._lock = threading.Lock()
        super().__init__(address, _Silent)
        self.set_app(application)

    def process_request(self, request: Any, client_address: Any) -> None:
        now = time.monotonic()
        with self._lock:
            too_long = [one for one, since in self._open.items() if now - since > _MAX_CONNECTION_SECONDS]
            too_many = list(self._open)[: max(0, len(self._open) + 1 - MAX_CONNECTIONS)]
            for one in {*too_long, *too_many}:
                del self._open[one]
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._open[request] = now
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a connection that ends early is no error of the daemon."""


@contextmanager
def serve_metrics(snapshots: StatsSnapshots, port: int, host: str) -> Iterator[None]:
    """Serve ``/metrics`` while the ``with`` block runs. Raises ConfigurationError when the address is taken."""
    registry = CollectorRegistry()
    registry.register(BuildInfoCollector("daemon"))
    registry.register(StoreCollector(snapshots))
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = MetricsServer((str(address[0]), port), family, make_wsgi_app(registry))
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another --metrics-port or --metrics-host"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
