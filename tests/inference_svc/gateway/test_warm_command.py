"""``kvsidecar warm --url`` at a gateway: addresses, and how long it takes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.root_command import app
from kvsidecar.errors import Unavailable
from typer.testing import CliRunner

from benchmarks.node import free_port
from tests.inference_svc.gateway.conftest import Gateway


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("a text to be read before anybody asks " * 20)
    return file


def warm(text: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["warm", str(text), *arguments], env={"COLUMNS": "300"})


@pytest.mark.parametrize("behind", ["", "/", "/v1", "/v1/"])
def test_the_url_may_be_that_of_openai_clients(gateway: Gateway, text: Path, behind: str) -> None:
    done = warm(text, "--url", f"{gateway.url}{behind}")
    assert done.exit_code == 0, done.exception
    assert "are stored now" in done.output


class _Starting(ThreadingHTTPServer):
    """A gateway whose workers are ready at the second request; it records the time that each request allows."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.within: list[float] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Starting

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.within.append(asked["within_seconds"])
        ready = len(self.server.within) > 1
        counts = {"prompt_tokens": 3, "cached_tokens": 0, "stored_tokens": 3}
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps(counts if ready else {"error": {"message": "no worker is ready"}}).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log to the output of the test."""


@pytest.fixture
def starting() -> Iterator[_Starting]:
    with _Starting() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_wait_for_the_gateway_ends_at_the_deadline(text: Path) -> None:
    url, began = f"http://127.0.0.1:{free_port()}", time.monotonic()
    done = warm(text, "--url", url, "--wait", "2m", "--within", "3s")
    assert isinstance(done.exception, Unavailable), done.output
    assert f"no gateway serves at {url}" in str(done.exception)
    assert time.monotonic() - began < 60


def test_a_wait_for_the_gateway_is_a_part_of_the_time(starting: _Starting, text: Path) -> None:
    done = warm(text, "--url", f"http://127.0.0.1:{starting.server_port}", "--wait", "5m", "--within", "10m")
    assert done.exit_code == 0, done.exception
    first, second = starting.within
    assert second < first - 0.5, "a second passes between two attempts"
    assert first <= 600


def test_a_gateway_that_is_not_ready_is_waited_for_only_on_demand(starting: _Starting, text: Path) -> None:
    done = warm(text, "--url", f"http://127.0.0.1:{starting.server_port}", "--within", "10m")
    assert isinstance(done.exception, Unavailable), done.output
    assert "no worker is ready" in str(done.exception)
    assert len(starting.within) == 1
