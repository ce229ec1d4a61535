"""guidellm and aiperf against our URL: every request of a short run is answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.served_node import Server

BIN = Path(sys.executable).parent
_SECONDS = 400
REQUESTS = 4


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=folder, timeout=_SECONDS, check=False,
        capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.skipif(not (BIN / "guidellm").exists(), reason="guidellm is not here; make test-frameworks runs it")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm_ends_without_an_error(server: Server, tmp_path: Path, path: str) -> None:
    text = "kind=synthetic_text,prompt_tokens=32,output_tokens=8"
    # A turn with tools and one with the tool's result: of chats and responses, which have tools.
    talk = "" if path == "/v1/completions" else ",turns=2,tool_call_turns=1"
    command = ["guidellm", "run", "--profile", "kind=synchronous", "--data", text + talk, "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={server.url},model={server.model},request_format={path}"]
    command[-1] += ",tool_call_missing_behavior=ignore_continue" if talk else ""
    command += [
        "--constraint",
        f"kind=max_requests,count={REQUESTS}",
        "--output",
        f"kind=json,path={tmp_path}/out.json",
    ]
    command += ["--tokenizer", f"kind=huggingface_auto,model={server.tokenizer}"]
    run(command, tmp_path)
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert counts["successful"] >= REQUESTS, counts
    assert counts["errored"] == 0, benchmark["requests"]["errored"][:2]


@pytest.mark.skipif(not (BIN / "aiperf").exists(), reason="aiperf is not here; make test-frameworks runs it")
@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_aiperf_ends_without_an_error(server: Server, tmp_path: Path, endpoint: str) -> None:
    command = ["aiperf", "profile", "--model", server.model, "--url", server.url, "--endpoint-type", endpoint]
    command += ["--streaming", "--tokenizer", "builtin", "--request-count", str(REQUESTS), "--concurrency", "2"]
    command += ["--isl", "32", "--osl", "8", "--output-artifact-dir", str(tmp_path / "out"), "--ui", "none"]
    command += ["--use-server-token-count", "--per-chunk-usage"] if endpoint == "chat" else []
    run(command, tmp_path)
    (found,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    told: dict[str, Any] = json.loads(found.read_text())
    assert told["request_count"]["avg"] == REQUESTS
    assert not told.get("error_summary")
