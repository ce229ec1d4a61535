"""Clients that break off, dawdle, keep silent or come from elsewhere: each costs its own connection alone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvsidecar import Client
from kvsidecar.cli.root_command import app
from kvsidecar.errors import ConfigurationError, FailedPrecondition
from pydantic import ValidationError
from typer.testing import CliRunner

from benchmarks.node import Node
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.json_scanner import MAX_DEPTH
from tests.inference_svc.gateway.conftest import Gateway, of_node

PAGE = "https://chat.example.com"
PATIENCE_SECONDS = 30.0
SECRET = "the otter sleeps in the reeds"


def test_a_client_of_grpc_is_told_that_it_asks_an_http_address(two: Node) -> None:
    own = of_node(two)
    try:
        for host in ("127.0.0.1", "localhost"):
            with Client(f"{host}:{own.port}") as client, pytest.raises(FailedPrecondition) as said:
                client.model()
            assert f":{own.port} is an HTTP address" in str(said.value)
            assert f"--url http://127.0.0.1:{own.port}" in str(said.value) or host == "localhost"
            assert "worker-0.sock" in str(said.value)
        done = CliRunner().invoke(app, ["generate", "x", "--worker", f"127.0.0.1:{own.port}"])
        assert isinstance(done.exception, FailedPrecondition)
    finally:
        own.close()
    lines = [line for line in two.wait_for_log("Invalid HTTP request received") if line[0] == "{"]
    assert {json.loads(line)["level"] for line in lines} == {"warning"}


@pytest.fixture(scope="module")
def short(two: Node) -> Iterator[Gateway]:
    """One that waits for half a second, and lets a page in."""
    found = of_node(two, "--receive-seconds", "0.5", "--allow-origins", f"{PAGE}, https://other.example:8443")
    yield found
    found.close()


def connected(gateway: Gateway, said: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_SECONDS)
    made.sendall(said)
    return made


def posted(length: int, body: bytes, request_id: str = "posted") -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {request_id}\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode() + body


def heard(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("said", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"])
def test_who_asks_nothing_is_not_waited_for(short: Gateway, said: bytes) -> None:
    assert heard(connected(short, said)) == b""


def test_a_body_that_does_not_come_is_refused_and_its_connection_closed(short: Gateway) -> None:
    head, _, body = heard(connected(short, posted(100, b'{"prompt": "'))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["message"] == "the body did not come within 0.5 s"


def test_an_answer_may_take_longer_and_a_connection_is_used_again(short: Gateway) -> None:
    asked = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
    with httpx.Client(base_url=short.url, timeout=120) as client:
        for _ in range(2):
            answer = client.post("/v1/completions", json=asked).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 600


def log_of(node: Node) -> str:
    return (node.folder / "log").read_text()


def test_who_breaks_off_leaves_no_traceback_and_no_prompt_in_the_log(short: Gateway, two: Node) -> None:
    body, before = json.dumps({"prompt": SECRET, "max_tokens": 2000, "ignore_eos": True}).encode(), len(log_of(two))
    sent = {"cut": (500, body), "gone": (len(body), body), "bad": (len(body), body[:-1] + b"?")}
    requests = [posted(*request, request_id=f"broken-{name}") for name, request in sent.items()]
    for said in (*requests, b"\x16\x03" + body):
        connected(short, said).close()
    for name in sent:
        two.wait_for_log(f'"request_id": "broken-{name}"')
    assert httpx.post(f"{short.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    log = log_of(two)[before:]
    assert "Traceback" not in log
    assert "ClientDisconnect" not in log
    assert SECRET not in log


def test_pages_that_are_let_in_may_ask_with_a_key(short: Gateway) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = httpx.options(f"{short.url}/v1/chat/completions", headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    failed = httpx.post(f"{short.url}/v1/completions", json={}, headers={"Origin": PAGE})
    assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (400, PAGE)


def test_other_pages_are_not(short: Gateway, gateway: Gateway) -> None:
    for origin, at in (("https://evil.example", short), (f"{PAGE}.evil.example", short), (PAGE, gateway)):
        answer = httpx.get(f"{at.url}/v1/models", headers={"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers


def test_pages_learn_also_that_a_key_is_missing(two: Node) -> None:
    locked = of_node(two, "--api-key", "k", "--allow-origins", "*")
    try:
        answer = httpx.get(f"{locked.url}/v1/models", headers={"Origin": PAGE})
    finally:
        locked.close()
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "*")


@pytest.mark.parametrize("origin", ["chat.example.com", "https://", "ftp://x", "https://x/path", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises((ValidationError, ConfigurationError), match="is no origin; write"):
        GatewayConfig(allow_origins=origin)


@pytest.mark.parametrize(
    ("more", "status", "param", "code", "said"),
    [
        ({"guided_regex": "(a{1000}){1000}"}, 400, "guided_regex", "invalid_request", "it is too complex"),
        (
            {"guided_choice": ["yes"], "allowed_token_ids": [5]}, 422, "allowed_token_ids", "grammar_failed",
            "has no token that the grammar allows here",
        ),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_followed_is_its_senders(
    gateway: Gateway, more: dict[str, Any], status: int, param: str, code: str, said: str
) -> None:
    answer = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x", "max_tokens": 4} | more, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert said in error["message"]


def test_the_place_of_a_wrong_name_is_named(gateway: Gateway) -> None:
    answer = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x", "logit_bias": {"five": 1}})
    assert answer.json()["error"]["param"] == "logit_bias.five"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused_before_it_comes_back(gateway: Gateway, number: str) -> None:
    """Answers of this path have the metadata and the tools that they were asked with."""
    for more in (
        f'"metadata": {{"a": {number}}}',
        f'"tools": [{{"type": "function", "name": "f", "parameters": {{"a": {number}}}}}]',
    ):
        body = f'{{"input": "x", "max_output_tokens": 1, {more}}}'
        answer = httpx.post(f"{gateway.url}/v1/responses", content=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert f"{number.lstrip('-')}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_what_is_said_of_long_names_is_short(gateway: Gateway, path: str) -> None:
    said = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
    said |= {"input" if path == "responses" else "prompt": "x"} if not said else {}
    for wrong in ({"model": "m" * 100_000}, {"n" * 100_000: 1}, {"n" * 100_000: "\ud800"}):
        body = json.dumps(said | wrong)
        answer = httpx.post(f"{gateway.url}/v1/{path}", content=body, timeout=60)
        assert answer.status_code in (400, 404)
        assert len(answer.text) < 2000


def test_what_is_nested_to_the_limit_comes_back_and_more_is_refused(gateway: Gateway) -> None:
    codes = {}
    for levels in (MAX_DEPTH - 1, MAX_DEPTH, 1000):
        nested = '{"a":' * levels + "1" + "}" * levels
        body = f'{{"input": "x", "max_output_tokens": 1, "metadata": {nested}}}'
        answer = httpx.post(f"{gateway.url}/v1/responses", content=body, timeout=60)
        codes[levels] = answer.status_code
    assert codes == {MAX_DEPTH - 1: 200, MAX_DEPTH: 400, 1000: 400}
