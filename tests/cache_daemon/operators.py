"""Operators' commands, which run in this process or in a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from kvsidecar.cli.root_command import app
from kvsidecar.errors import KVSidecarError
from typer.testing import CliRunner

from benchmarks.node import Node
from cache_daemon import offline

COMMAND = [sys.executable, "-m", "kvsidecar.cli.root_command", "cache"]


def cache(*arguments: object, of: Node | None = None) -> str:
    """Run ``kvsidecar cache`` with its output in a pipe; return the output. Raises the command's exceptions."""
    where = ["--socket", str(of.cache_socket)] if of is not None else []
    result = CliRunner().invoke(app, ["cache", *map(str, arguments), *where])
    if isinstance(result.exception, KVSidecarError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return str(result.stdout)


def on_store(*arguments: object, expect: int = 0) -> str:
    """Run a command on the store of a stopped daemon; return its output. Raises the command's exceptions."""
    result = CliRunner().invoke(offline.app, [str(a) for a in arguments])
    if isinstance(result.exception, KVSidecarError):
        raise result.exception
    assert result.exit_code == expect, (result.output, result.exception)
    return str(result.stdout)


def in_terminal(arguments: list[str], columns: int = 100, press: bytes = b"", after: str = "") -> str:
    """Run ``kvsidecar cache`` in a terminal; return its output. Types ``press`` when ``after`` has appeared."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "60", "TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    shown += os.read(master, 65536)
                except OSError:  # the process has closed the terminal
                    break
            if press and after.encode() in shown:
                os.write(master, press)
                press = b""
        assert process.wait(10) == 0, shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return shown.decode()


def daemon_that_ends(
    folder: Path, *flags: object, stdin: IO[bytes] | int | None = None
) -> subprocess.CompletedProcess[str]:
    folder.chmod(0o700)
    command = [sys.executable, "-m", "cache_daemon", "--socket", folder / "s", "--store", "none", *flags]
    return subprocess.run([str(part) for part in command], stdin=stdin, capture_output=True, text=True, timeout=60)
