"""Anthropic's TypeScript SDK, of the version that its lock file names, against a real node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.node import Node
from tests.clients.toolchains import BUILT
from tests.inference_svc.gateway.conftest import of_node

pytestmark = pytest.mark.timeout(900)
SOURCES = Path(__file__).parent / "anthropic_sdk"


@pytest.fixture(scope="module")
def script() -> Path:
    """The script beside the installed SDK."""
    missing = ", ".join(command for command in ("node", "npm") if shutil.which(command) is None)
    if missing:
        pytest.skip(f"not installed for typescript: {missing}; clients/typescript/README.md names packages")
    folder = BUILT / "anthropic"
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "messages.mjs"


def test_messages_streams_calls_counts_and_errors(script: Path) -> None:
    patience = {"cache_timeout_ms": 20_000}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=patience) as node:
        gateway = of_node(node)
        try:
            command = ["node", str(script), gateway.url]
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        finally:
            gateway.close()
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["whole"]["type"], found["whole"]["model"]) == ("message", "demo")
    kinds = found["kinds"]
    assert (kinds[0], kinds[1], kinds[-2:]) == (
        "message_start",
        "content_block_start",
        ["message_delta", "message_stop"],
    )
    assert found["call"]["name"] == "keep"
    assert found["call"]["input"]["note"] in ("one", "two")
    usage = found["second"]["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert prompt == found["counted"]
    assert usage["cache_read_input_tokens"] > prompt // 2
    error = found["error"]
    assert (error["kind"], error["status"], error["type"]) == ("NotFoundError", 404, "not_found_error")
    assert error["id"].startswith("req_")
