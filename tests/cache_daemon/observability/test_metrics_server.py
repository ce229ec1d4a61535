"""The metrics port: silent connections neither block a scrape nor add up."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.node import free_port
from cache_daemon.observability import metrics_server
from cache_daemon.observability.metrics_server import MAX_CONNECTIONS, MetricsServer

BODY = b"kvsidecar_up 1\n"


def application(_: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [BODY]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a server whose idle timeout ends no connection of the test."""
    monkeypatch.setattr(metrics_server._Silent, "timeout", 60.0)
    found = free_port()
    server = MetricsServer(("127.0.0.1", found), socket.AF_INET, application)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_new_connection_closes_the_oldest_at_the_limit(port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(2 * MAX_CONNECTIONS)]
    try:
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read() == BODY
        oldest, newest = silent[: MAX_CONNECTIONS + 1], silent[MAX_CONNECTIONS + 1 :]
        assert [one.recv(1) for one in oldest] == [b""] * len(oldest), "closed, one of them by the scrape"
        for one in newest:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)
    finally:
        for one in silent:
            one.close()
