"""``kvsidecar status`` and ``stop`` where no supervisor runs; with one: tests/inference_svc/node/test_supervisor.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from kvsidecar.cli.node_commands import parts_in
from kvsidecar.process.node_report import LOCK, find_node


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "kvsidecar.cli.root_command", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_where_nothing_runs_both_say_so(folder: Path) -> None:
    for name, code in (("status", 1), ("stop", 0)):
        done = command(name, "--runtime-dir", str(folder))
        assert (done.returncode, done.stderr) == (code, "")
        assert f"nothing runs in {folder}" in done.stdout


def test_a_daemon_alone_is_seen_and_stopped(folder: Path) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "cache_daemon", "--socket", str(folder / "cache.sock"), "--store", "none",
         "--arena-bytes", "1MiB"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert daemon.stdout is not None
    assert any("serving" in line for line in daemon.stdout)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "worker-0.sock"))
    left.close()
    said = command("status", "--json", "--runtime-dir", str(folder))
    cache, worker = json.loads(said.stdout)
    assert said.returncode == 1
    assert (cache["name"], psutil.Process(cache["pid"]).ppid(), cache["serving"]) == ("cache", daemon.pid, True)
    assert (worker["name"], worker["pid"], worker["serving"]) == ("worker-0", -1, False)
    assert (cache["state"], worker["state"]) == ("serving", "not serving")
    reaped = threading.Thread(target=daemon.wait)
    reaped.start()
    done = command("stop", "--runtime-dir", str(folder))
    reaped.join(60)
    assert done.stdout == f"stopped kvsidecar daemon (process {daemon.pid})\n"
    assert (done.returncode, daemon.returncode) == (0, 0)
    daemon.stdout.close()


def test_what_a_node_that_was_killed_said_of_itself_counts_no_more(folder: Path) -> None:
    """Nor does a file that is none of ours; its number may be another process's by now."""
    for text in ("", "[]", "{}", '{"pid": "x"}', '{"pid": %d, "url": "http://x:1", "workers": 2, "cache": true}'):
        (folder / LOCK).write_text(text % os.getpid() if "%d" in text else text)
        assert find_node(folder) is None
    assert parts_in(folder) == []
