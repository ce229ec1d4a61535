"""The router smg itself before a worker: what a client of it gets is what the worker answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.node import free_port
from tests.inference_svc.server.vllm_grpc.conftest import Door

SMG = os.environ.get("KVSIDECAR_TEST_SMG", "")
pytestmark = [pytest.mark.smg, pytest.mark.skipif(not SMG, reason="needs smg; make test-smg runs it")]

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello there"}], "temperature": 0}
LONG = {"model": "demo", "messages": [{"role": "user", "content": "tell me more " * 100}], "temperature": 0}


@pytest.fixture(scope="module")
def router(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port, log = free_port(), tmp_path_factory.mktemp("smg") / "log"
    command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"grpc://{door.address}", "--policy", "cache_aware"]
    command += ["--prometheus-port", str(free_port())]
    paths = os.pathsep.join([SMG, *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, "PYTHONPATH": paths})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
            _wait(client, process, log)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/readiness").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"smg is not ready:\n{log.read_text(errors='replace')[-3000:]}")


def chat(router: httpx.Client, **body: Any) -> Any:
    answer = router.post("/v1/chat/completions", json={**CHAT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def in_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_it_knows_the_worker(router: httpx.Client) -> None:
    (worker,) = router.get("/workers").json()["workers"]
    assert (worker["runtime_type"], worker["connection_mode"], worker["is_healthy"]) == ("vllm", "grpc", True)
    assert [model["id"] for model in router.get("/v1/models").json()["data"]] == ["demo"]


def test_a_chat_through_it_is_the_workers_answer(door: Door, router: httpx.Client) -> None:
    """To a schema, without which the built-in model says nothing."""
    schema = {"type": "string", "pattern": "^[a-z ]{40}$"}
    own = door.node.client().generate(CHAT["messages"], max_tokens=60, temperature=0, json_schema=schema)
    body = {"max_tokens": 60, "response_format": in_schema(schema)}
    whole = chat(router, **body)
    assert whole["choices"][0]["message"]["content"].strip() == own.text.strip() != ""
    assert whole["usage"]["prompt_tokens"] == own.prompt_tokens
    pieces = []
    with router.stream("POST", "/v1/chat/completions", json={**CHAT, **body, "stream": True}) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert len([piece for piece in pieces if piece]) > 1


def test_schemas_and_calls_are_kept_to(router: httpx.Client) -> None:
    found = chat(router, max_tokens=20, response_format=in_schema({"enum": [12, 13]}))
    assert json.loads(found["choices"][0]["message"]["content"]) in (12, 13)
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    parameters["additionalProperties"] = False  # the built-in model would find no end
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    forced = {"type": "function", "function": {"name": "f"}}
    found = chat(router, max_tokens=400, tools=[tool], tool_choice=forced)
    message = found["choices"][0]["message"]
    assert "tool_calls" in message, found
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)


def test_it_tells_what_had_been_read_before(door: Door, router: httpx.Client) -> None:
    def cached() -> int:
        usage = chat(router, **LONG, max_tokens=4)["usage"]
        door.node.settle()
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 200
