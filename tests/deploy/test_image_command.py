"""The image's own command, run outside of an image: it serves without a model or pip."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.node import free_port
from tests.deploy.installation import ROOT, without_paths
from tests.deploy.playing import wait_for


@pytest.mark.timeout(500)
def test_it_serves_with_empty_volumes_and_no_index(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text(encoding="utf-8")
    (command,) = [json.loads(found) for found in re.findall(r"^CMD (.*)$", text, re.M)]
    port = free_port()
    own = {"KVSIDECAR_PORT": str(port), "PIP_NO_INDEX": "1", "HOME": str(tmp_path)}
    own |= {f"XDG_{name}": str(tmp_path / "run") for name in ("RUNTIME_DIR", "DATA_HOME", "CACHE_HOME")}
    program = [sys.executable, "-m", "kvsidecar.cli.root_command", *command]
    node = subprocess.Popen(program, env=without_paths() | own)

    def answered() -> int:
        assert node.poll() is None
        try:
            body = {"prompt": "one two three", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            found = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        except httpx.HTTPError:
            return 0
        return int(found.json()["usage"]["completion_tokens"]) if found.status_code == 200 else 0

    try:
        assert wait_for(answered, 300) == 3
        node.terminate()
        assert node.wait(60) == 0
    finally:
        node.kill()
        node.wait()
