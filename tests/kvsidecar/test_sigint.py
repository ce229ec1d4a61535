"""Ctrl-C: whatever a command is at, it ends without a traceback."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inference_svc.server import worker_server
from inference_svc.server.worker_config import WorkerConfig


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_within_the_block_the_process_ends_quietly() -> None:
    done = run(
        "import os, signal; from kvsidecar.process.sigint import quiet_sigint\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever runs the tests may ignore it
        "with quiet_sigint(): os.kill(os.getpid(), signal.SIGINT)"
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_after_it_python_raises_again() -> None:
    from kvsidecar.process.sigint import quiet_sigint

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with quiet_sigint():
            pass
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    done = run(
        "import os, signal; from kvsidecar.process.sigint import quiet_sigint\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with quiet_sigint(): os.kill(os.getpid(), signal.SIGINT)\n"
        "print('goes on')"
    )
    assert done.stdout == "goes on\n"


@pytest.mark.parametrize("module", ["kvsidecar.cli.entry", "inference_svc.__main__", "cache_daemon.__main__"])
def test_nothing_slow_is_imported_before_the_block(module: str) -> None:
    done = run(
        f"import sys, {module}; print(sorted({{'grpc', 'numpy', 'pydantic', 'torch', 'typer'}} & {{*sys.modules}}))"
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_gateway_that_starts_ends_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inference_svc", "gateway", "--port=0", "--cache-socket=none"]
    with subprocess.Popen(
        [*command, f"--workers={tmp_path / 'nobody.sock'}"], stderr=subprocess.PIPE, text=True
    ) as gateway:
        assert gateway.stderr is not None
        assert "listening" in gateway.stderr.readline()
        gateway.send_signal(signal.SIGINT)
        said = gateway.stderr.read()
    assert (gateway.returncode, said) == (0, "")


class Ended(BaseException):
    """Raised instead of ending the process."""


async def test_a_worker_does_not_finish_loading_before_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(worker_server, "build_runtime", lambda config: loaded.wait(60))
    monkeypatch.setattr(os, "_exit", end)
    stop = asyncio.Event()
    stop.set()
    try:
        with pytest.raises(Ended):
            await worker_server._build_or_exit(WorkerConfig(), stop)
    finally:
        loaded.set()
    assert codes == [0]
