"""The Vercel AI SDK over chats, responses and Anthropic's messages: texts, streams, tool loops, structured output."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.served_node import Server

pytestmark = pytest.mark.timeout(900)
SOURCES = Path(__file__).parent / "vercel_ai"
BUILT = Path(__file__).parents[2] / "build" / "clients" / "vercel_ai"


@pytest.fixture(scope="module")
def script() -> Path:
    """The script beside the installed packages."""
    missing = ", ".join(command for command in ("node", "npm") if shutil.which(command) is None)
    if missing:
        pytest.skip(f"not installed for typescript: {missing}; clients/typescript/README.md names packages")
    shutil.copytree(SOURCES, BUILT, dirs_exist_ok=True)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"]
    done = subprocess.run(command, cwd=BUILT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return BUILT / "loop.mjs"


def test_a_tool_loop_over_each_protocol(server: Server, script: Path) -> None:
    command = ["node", str(script), server.url, server.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"chat", "responses", "messages"}
    for protocol, told in found.items():
        assert len(told["asked"]) >= 2, protocol  # one of each loop; a small model may ask twice at once
        assert set(told["asked"]) <= {"Oslo", "Rome"}
        assert told["steps"] == [2, 2]
        assert told["finish"] == ["tool-calls", "tool-calls"]
        assert told["texts"][1] == told["texts"][2]
        assert told["usage"] > 0
        assert told["structured"]["city"] in ("Oslo", "Rome")
