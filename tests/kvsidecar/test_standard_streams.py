"""Start of each process with closed standard descriptors."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.condition_wait import until
from benchmarks.node import free_port


def end_after_start(program: list[str], address: Path | tuple[str, int], closed: str) -> int:
    """Start a program with closed descriptors, and end it once it serves. Returns its exit code."""
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-m", *program]
    with subprocess.Popen(command) as process:
        try:
            until(lambda: process.poll() is not None or serves(address))
            assert process.poll() is None, "it ended at its start"
            started = psutil.Process(process.pid)
            for one in (started, *started.children(recursive=True)):
                taken = {Path(f"/proc/{one.pid}/fd/{number}").readlink() for number in range(closed.count("&-"))}
                assert taken == {Path("/dev/null")}
            process.terminate()
            return process.wait(30)
        finally:
            process.kill()


def serves(address: Path | tuple[str, int]) -> bool:
    with socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET) as client:
        return client.connect_ex(str(address) if isinstance(address, Path) else address) == 0


@pytest.mark.parametrize("closed", ["0<&-", "0<&- 1>&-", "0<&- 1>&- 2>&-"])
def test_a_daemon_serves_with_closed_standard_descriptors(tmp_path: Path, closed: str) -> None:
    tmp_path.chmod(0o700)
    at = tmp_path / "s"
    daemon = ["cache_daemon", "--store", "none", "--arena-bytes", "16MiB", "--socket", str(at)]
    assert end_after_start(daemon, at, closed) == 0


@pytest.mark.parametrize("closed", ["0<&-", "0<&- 1>&- 2>&-"])
def test_a_gateway_serves_with_closed_standard_descriptors(tmp_path: Path, closed: str) -> None:
    port = free_port()
    gateway = ["inference_svc", "gateway", "--port", str(port), "--workers", str(tmp_path / "w.sock")]
    assert end_after_start(gateway, ("127.0.0.1", port), closed) == 0
