"""What serves dies and comes back; its guardian says who runs it whether it should."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.node import Node
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.operators import daemon_that_ends


def test_a_daemon_that_is_killed_is_back_at_once_with_what_was_durable(daemon: Node) -> None:
    peer = Peer(daemon)
    peer.put([1, 2, 3])
    daemon.settle()
    peer.close()
    first = daemon.pid("daemon")
    daemon.crash_daemon()
    daemon.wait_daemon()
    again = Peer(daemon)
    assert again.read([1, 2, 3]) == 3
    assert daemon.pid("daemon") != first
    again.close()
    # How long it starts is the machine's affair; that nothing is waited for before is the guardian's.
    (line,) = daemon.wait_for_log("daemon died")
    assert json.loads(line)["backoff_seconds"] == 0


def test_no_daemon_outlives_its_guardian(daemon: Node) -> None:
    serving = os.pidfd_open(daemon.pid("daemon"))
    os.kill(daemon._processes["a-daemon"].pid, signal.SIGKILL)
    ending = select.poll()  # select() takes no descriptor above 1023
    ending.register(serving, select.POLLIN)
    assert ending.poll(10_000)
    os.close(serving)
    daemon._processes.pop("a-daemon").wait()
    daemon.start_daemon()  # nothing holds the socket


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_guardian_ends_both_in_order(start: Callable[..., Node], number: signal.Signals) -> None:
    node = start()
    serving, process = psutil.Process(node.pid("daemon")), node._processes["a-daemon"]
    process.send_signal(number)
    assert process.wait(20) == 0
    assert not serving.is_running()
    del node._processes["a-daemon"]
    assert node.count_in_log("Traceback") == 0


def test_whatever_kills_it_again_and_again_while_it_serves_it_comes_back(daemon: Node) -> None:
    for _ in range(7):
        daemon.crash_daemon()
        daemon.wait_daemon()


def test_what_dies_again_and_again_before_it_serves_is_given_up(daemon: Node) -> None:
    process = daemon._processes["a-daemon"]
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # one that was killed before, and is reaped now
                child.kill()
        time.sleep(0.01)
    assert process.wait(5) == 128 + signal.SIGKILL
    assert "giving up" in daemon.read_log()
    del daemon._processes["a-daemon"]


_HANDLES_LATE = """
import signal, sys, threading, time
from cache_daemon.prefork_supervisor import unblock_reload_signal, run_supervised
def run():
    print("begun", flush=True)
    sys.stdin.readline()
    heard = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: heard.set())
    unblock_reload_signal()
    return 0 if heard.wait(10) else 3
raise SystemExit(run_supervised(run))
"""


def test_a_reload_while_it_starts_is_heard_once_it_can_be_and_ends_nothing() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _HANDLES_LATE], stdin=pipe, stdout=pipe, text=True) as guardian:
        assert guardian.stdout is not None
        assert guardian.stdout.readline() == "begun\n"
        guardian.send_signal(signal.SIGHUP)
        (child,) = psutil.Process(guardian.pid).children()
        deadline = time.monotonic() + 10
        while not int(re.search(r"ShdPnd:\t(\w+)", Path(f"/proc/{child.pid}/status").read_text())[1], 16) & 1:  # type: ignore[index]
            assert time.monotonic() < deadline, "it was not passed on"
            time.sleep(0.01)
        assert guardian.stdin is not None
        guardian.stdin.write("go on\n")
        guardian.stdin.close()
        assert guardian.wait(20) == 0
        assert guardian.stdout.read() == "", "it was not started again"


_DIES = """
import os, signal
from kvsidecar.cli.service_settings import configure_logging
from cache_daemon.prefork_supervisor import run_supervised, mark_serving
configure_logging("info")
def run():
    mark_serving()
    os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit(run_supervised(run))
"""


def test_what_dies_again_and_again_is_started_with_growing_pauses_which_a_signal_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", _DIES], stderr=subprocess.PIPE, text=True) as guardian:
        assert guardian.stderr is not None
        pauses: list[float] = []
        for line in guardian.stderr:
            if found := re.search(r"backoff_seconds\W+([\d.]+)", line):
                pauses.append(float(found[1]))
            if len(pauses) == 5:
                break
        guardian.send_signal(signal.SIGTERM)
        assert guardian.wait(20) == 0
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4]


def test_a_daemon_ends_with_its_standard_input_if_told_to(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as file:
        done = daemon_that_ends(tmp_path, "--end-with-stdin", stdin=file)
    assert done.returncode == 2
    assert "standard input is neither a pipe nor a terminal; leave it out" in done.stderr
    assert "Traceback" not in done.stderr
    reading, writing = os.pipe()
    os.write(writing, b"what nobody reads")
    os.close(writing)
    done = daemon_that_ends(tmp_path, "--end-with-stdin", "--arena-bytes", "1MiB", stdin=reading)
    os.close(reading)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "s").exists()
