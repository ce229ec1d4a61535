"""What serves dies and comes back; its guardian says who runs it whether it should."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.node import Node
from tests.cache_daemon.conftest import Peer


def started(pid: int) -> float:
    """When a process was made, in seconds since the machine was."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def test_a_daemon_that_is_killed_is_back_at_once_with_what_was_durable(daemon: Node) -> None:
    peer = Peer(daemon)
    peer.put([1, 2, 3])
    daemon.settle()
    peer.close()
    first = daemon.pid("daemon")
    killed = time.clock_gettime(time.CLOCK_BOOTTIME)
    daemon.crash_daemon()
    daemon.wait_daemon()
    again = Peer(daemon)
    assert again.read([1, 2, 3]) == 3
    assert daemon.pid("daemon") != first
    again.close()
    # How long it starts is the machine's affair; that nothing is waited for before is the guardian's.
    assert started(daemon.pid("daemon")) - killed < 1


def test_no_daemon_outlives_its_guardian(daemon: Node) -> None:
    serving = os.pidfd_open(daemon.pid("daemon"))
    os.kill(daemon._processes["a-daemon"].pid, signal.SIGKILL)
    assert select.select([serving], [], [], 10)[0]
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
    assert "Traceback" not in node.read_log()


def test_whatever_kills_it_again_and_again_while_it_serves_it_comes_back(daemon: Node) -> None:
    for _ in range(7):
        daemon.crash_daemon()
        daemon.wait_daemon()


def test_what_dies_again_and_again_before_it_serves_is_given_up(daemon: Node) -> None:
    process = daemon._processes["a-daemon"]
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children():
            child.kill()
        time.sleep(0.01)
    assert process.wait(5) == 128 + signal.SIGKILL
    assert "giving up" in daemon.read_log()
    del daemon._processes["a-daemon"]
