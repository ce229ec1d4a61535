"""What the gateway says before a worker is ready, and how soon it sees one. A worker here answers one question."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

from benchmarks.node import free_port

# As long as a small model loads: gRPC's own pauses have grown to seconds by then.
_LOADING_SECONDS, _SOON = 9.5, 3.0
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


class Ready(InferenceServiceServicer):
    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(model_id="mine", context_length=100)


def worker(socket: Path) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(2))
    add_InferenceServiceServicer_to_server(Ready(), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "inference_svc", "gateway", "--port", str(port), "--workers", f"{tmp_path}/w.sock"]
    with subprocess.Popen([*command, "--log-level", "error"]) as process:
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def until_answered(url: str, seconds: float) -> httpx.Response:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return httpx.get(url, timeout=30)
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.alone
def test_a_worker_that_becomes_ready_is_seen_at_once(gateway: str, tmp_path: Path) -> None:
    first = until_answered(f"{gateway}/v1/models", 90)
    for answer in (first, httpx.post(f"{gateway}/v1/chat/completions", json=CHAT, timeout=30)):
        assert answer.status_code == 503
        assert "no inference worker is ready yet: the model is still being loaded" in answer.json()["error"]["message"]
    assert httpx.get(f"{gateway}/health", timeout=30).status_code == 503
    time.sleep(_LOADING_SECONDS)
    ready = worker(tmp_path / "w.sock")
    began = time.monotonic()
    while (answer := httpx.get(f"{gateway}/v1/models", timeout=30)).status_code == 503:
        assert time.monotonic() - began < _SOON, "it is not seen"
        time.sleep(0.02)
    assert [m["id"] for m in answer.json()["data"]] == ["mine"]
    ready.stop(None).wait()
    deadline = time.monotonic() + 60
    while (answer := httpx.get(f"{gateway}/v1/models", timeout=30)).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "no inference worker is up; try again in a moment" in answer.json()["error"]["message"]
