"""The gateway's line for every request."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from benchmarks.node import Node
from inference_svc.gateway.request_log import RequestLogMiddleware
from tests.inference_svc.gateway.conftest import Gateway, of_node

SECRET, KEY = "the marmot whistles at noon", "sesame-4711"


@pytest.fixture(scope="module")
def keyed(two: Node) -> Iterator[Gateway]:
    found = of_node(two, "--api-key", KEY)
    yield found
    found.close()


class Asked:
    """Sends requests with their own ids, and reads their log lines."""

    def __init__(self, gateway: Gateway, node: Node) -> None:
        self._url, self._log = gateway.url, node.folder / "log"
        self.headers = {"Authorization": f"Bearer {KEY}"}

    def line(self, path: str, body: Any, method: str = "POST", **more: Any) -> dict[str, Any]:
        """Send a request; wait for its log line and return it."""
        name = f"test-{uuid.uuid4()}"  # the log is one for all tests
        headers = {**self.headers, "X-Request-Id": name, **more}
        with httpx.stream(method, self._url + path, json=body, headers=headers, timeout=60) as answer:
            if not (isinstance(body, dict) and body.get("max_tokens") == 3000):
                answer.read()  # else it goes, as soon as something comes
        return self.of(name)

    def of(self, name: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while True:
            said = self._log.read_text()
            assert SECRET not in said
            assert KEY not in said
            found = [json.loads(line) for line in said.splitlines() if f'"request_id": "{name}"' in line]
            if found:
                (only,) = found
                return dict(only)
            assert time.monotonic() < deadline, said[-2000:]
            time.sleep(0.05)


@pytest.fixture
def asked(keyed: Gateway, two: Node) -> Asked:
    return Asked(keyed, two)


def test_an_answer_has_a_line_without_what_was_said(asked: Asked) -> None:
    body = {"prompt": f"{SECRET} and sleeps", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    for stream in (False, True):
        line = asked.line("/v1/completions", body | {"stream": stream})
        assert (line["event"], line["level"], line["logger"]) == ("request", "info", "gateway")
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert line["id"].startswith("cmpl-")
        assert (line["model"], line["generated_tokens"], line["answers"]) == ("demo", 3, 1)
        assert line["prompt_tokens"] > line["cached_tokens"] >= 0
        assert 0 < line["ttft_ms"] <= line["ms"]
    assert line["cached_tokens"] > 0, "it was read before"
    line = asked.line("/v1/responses", {"input": SECRET, "max_output_tokens": 2})
    assert line["id"].startswith("resp-"), "not the response's own id, by which a reader could go on from it"


def test_answers_of_one_request_are_counted_together(asked: Asked) -> None:
    line = asked.line("/v1/completions", {"prompt": ["one", "two"], "n": 2, "max_tokens": 2, "ignore_eos": True})
    assert (line["answers"], line["generated_tokens"]) == (4, 8)


def test_a_refusal_is_named_by_its_reason(asked: Asked) -> None:
    line = asked.line("/v1/completions", {"prompt": SECRET, "temperature": -3})
    assert (line["status"], line["error"]) == (400, "INVALID_REQUEST")
    line = asked.line("/v1/nothing%1b%5b2J", None, method="GET")
    assert (line["status"], line["path"]) == (404, "/v1/nothing%1b%5b2J")
    line = asked.line("/v1/completions", {"prompt": SECRET}, Authorization="Bearer guessed")
    assert line["status"] == 401
    assert "guessed" not in str(line)


def test_who_goes_before_the_end_is_said_to_have_gone(asked: Asked) -> None:
    body = {"prompt": SECRET, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    line = asked.line("/v1/completions", body)
    assert line["broken_off"] == "the client has gone"
    assert "generated_tokens" not in line


def test_probes_and_names_that_are_no_names_are_not_written(asked: Asked, two: Node) -> None:
    asked.line("/v1/models", None, method="GET")
    health = {"X-Request-Id": "probe-1"}
    assert httpx.get(f"{asked._url}/health", headers=health).status_code == 200
    wild = asked.headers | {"X-Request-Id": f"{SECRET}!"}
    assert httpx.get(f"{asked._url}/v1/models", headers=wild).status_code == 200
    asked.line("/v1/models", None, method="GET")  # what came before it is written
    assert "probe-1" not in (two.folder / "log").read_text()


@pytest.mark.parametrize(("status", "level"), [(200, "info"), (400, "info"), (500, "error"), (503, "warning")])
def test_a_node_that_is_not_ready_is_no_error(status: int, level: str) -> None:
    """Those who wait for a node ask twice a second: it would begin with a page of errors."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=status)(scope, receive, send)

    with structlog.testing.capture_logs() as lines:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(RequestLogMiddleware(app)), base_url="http://localhost"
        )
        asyncio.run(client.get("/v1/models"))
    assert [(line["status"], line["log_level"]) for line in lines] == [(status, level)]
