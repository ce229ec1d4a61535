"""The kills of ``python -m benchmarks.gateway_chaos``."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys

import psutil

from benchmarks.condition_wait import until
from benchmarks.gateway_chaos import ServedNode

_SUPERVISOR = """
import subprocess, sys
ended = subprocess.Popen(["true"])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", "--name=worker-0"])
print(ended.pid, flush=True)
print(worker.wait(), flush=True)
"""


def test_a_child_that_has_just_ended_does_not_stop_the_kills() -> None:
    """A zombie has no command: psutil raises ZombieProcess."""
    node = ServedNode(argparse.Namespace(workers=1))
    with subprocess.Popen([sys.executable, "-c", _SUPERVISOR], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        ended = psutil.Process(int(supervisor.stdout.readline()))
        until(lambda: ended.status() == psutil.STATUS_ZOMBIE)
        until(lambda: any("--name=worker-0" in c.cmdline() for c in psutil.Process(supervisor.pid).children()[1:]))
        node._process = supervisor
        try:
            node.kill_worker()
            assert int(supervisor.stdout.readline()) == -signal.SIGKILL
        finally:
            supervisor.kill()
    node._folder.cleanup()
