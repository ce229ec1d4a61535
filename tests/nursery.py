"""Starts daemons and workers for tests by forking a process that has already imported them.

The started processes are real and have their real command lines. Imports take a second of CPU for a daemon and several
for a worker; the nursery spends this time only once. Tests of the start itself use new interpreters instead.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from kvsidecar.process.fast_import import gc_paused

from tests import busy_machine

# First the module with the main function, then modules that this function imports when it is called.
_WORKER = ["inference_svc.__main__", "inference_svc.server.worker_config", "inference_svc.server.worker_server"]
_IMPORTS = {
    "cache_daemon": [
        "cache_daemon.__main__",
        "cache_daemon.config",
        "cache_daemon.prefork_supervisor",
        "cache_daemon.server",
    ],
    "inference_svc": _WORKER,
    "tests.inference_svc.kernel_variant": ["tests.inference_svc.kernel_variant", "inference_svc.server.python_api"],
    "tests.kvkernels.doubles.simulated_worker": ["tests.kvkernels.doubles.simulated_worker", *_WORKER],
}
_MESSAGE_BYTES = 1 << 20
# A worker computes chunks that would be slower to load, and a fleet gateway prefers a node that answers in time. In
# tests, both wait longer, so that other work on the machine does not decide a test.
_PATIENT = {"worker": busy_machine.prefer_loads, "gateway": busy_machine.wait_for_nodes}


class Nursery:
    """Forks processes of one program, a key of ``_IMPORTS``. Thread-safe."""

    def __init__(self, package: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, "-m", "tests.nursery", package, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """End the nursery. The processes that it has started continue."""
        self._socket.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def start(self, arguments: Sequence[str], environment: dict[str, str], log: int) -> Nursling:
        """Start a process with these command-line arguments; the file descriptor ``log`` gets its output."""
        environment = busy_machine.ENVIRONMENT | environment
        request = {"arguments": list(arguments), "environment": environment, "folder": os.getcwd()}
        return Nursling(self, self._ask(request, [log]))

    def code_of(self, pid: int) -> int | None:
        """Return the exit code of a process, in subprocess's form; None while the process runs."""
        answer: int | None = self._ask({"ended": pid})
        return answer

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return json.loads(self._socket.recv(_MESSAGE_BYTES))


class Nursling:
    """A process from a nursery, with the interface of ``subprocess.Popen``."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            handle = os.pidfd_open(self.pid)  # it exists, at least as a zombie, until code_of has returned its code
            try:
                waiting = select.poll()  # select() accepts no descriptor above 1023
                waiting.register(handle, select.POLLIN)
                if not waiting.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            finally:
                os.close(handle)
        code = self.poll()
        assert code is not None, "it has ended, so it has a code"
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(package: str, descriptor: int) -> None:
    with gc_paused():
        run, *_ = [importlib.import_module(name) for name in _IMPORTS[package]]
    gc.freeze()  # otherwise each process collects all that was imported, and copies its pages
    with socket.socket(fileno=descriptor) as asking:
        while True:
            message, descriptors, *_ = socket.recv_fds(asking, _MESSAGE_BYTES, 1)
            if not message:
                return
            request = json.loads(message)
            if "ended" in request:
                pid, status = os.waitpid(request["ended"], os.WNOHANG)
                asking.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
                continue
            pid = os.fork()
            if not pid:
                asking.close()
                _become(run.main, request, descriptors[0])
            os.close(descriptors[0])
            asking.send(json.dumps(pid).encode())


def _become(run: Any, request: dict[str, Any], log: int) -> None:
    """Become the requested process in the forked child; never return."""
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if wait := _PATIENT.get(next(iter(request["arguments"]), "")):
            wait()
        code = run(request["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
