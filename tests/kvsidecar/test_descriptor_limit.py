"""Start of each process under a limit of open files that is too low to serve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("daemon", ["-m", "cache_daemon", "--socket", "c.sock", "--store", "none", "--arena-bytes", "16MiB"]),
        ("worker", ["-m", "inference_svc", "worker", "--model", "demo", "--socket", "w.sock"]),
        ("gateway", ["-m", "inference_svc", "gateway", "--workers", "w.sock"]),
        ("serve", ["-m", "inference_svc", "serve", "demo", "--runtime-dir", "run", "--port", "1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_process_that_may_open_too_few_files_says_so_and_ends(
    tmp_path: Path, name: str, arguments: list[str]
) -> None:
    tmp_path.chmod(0o700)
    given = [str(tmp_path / word) if word.endswith(".sock") or word == "run" else word for word in arguments]
    done = subprocess.run(
        ["prlimit", "--nofile=64:64", sys.executable, *given], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == (
        f"kvsidecar {name}: this process may open 64 files, and needs at least 128; raise its hard limit (ulimit -Hn, "
        "LimitNOFILE of systemd)\n"
    )
    assert done.returncode == 2
