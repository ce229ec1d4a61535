"""Node of real processes for benchmarks, demo and tests, with kills and restarts."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import grpc
import psutil
from kvsidecar import Client
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.process.runtime_dir import socket_target

_START_SECONDS = 180.0
_QUIET_SECONDS = 0.3


class Process(Protocol):
    """The part of ``subprocess.Popen`` that a node needs."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def new_interpreter(command: list[str], environment: dict[str, str], log: int) -> Process:
    """Run ``python -m`` with these arguments; the file descriptor ``log`` gets the output."""
    return subprocess.Popen(
        [sys.executable, "-m", *command], stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL
    )


# These ports are below the ports that Linux chooses itself, for clients and for binds of port 0.
_PORTS = range(22_000, 32_000)


def free_port() -> int:
    """Return a free port. No other call of this user has returned it lately, in any process."""
    path = Path(tempfile.gettempdir()) / f"kvsidecar-test-port-{os.getuid()}"
    with path.open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        last = int(counter.read() or 0)
        for i in range(1, len(_PORTS) + 1):
            port = _PORTS[(last + i) % len(_PORTS)]
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            counter.truncate(0)
            counter.write(str((last + i) % len(_PORTS)))
            return port
    raise OSError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")


class Node:
    """Context manager that runs a daemon and workers in a temporary folder."""

    launch: Callable[[list[str], dict[str, str], int], Process] = staticmethod(new_interpreter)

    def __init__(
        self,
        model: str = "demo",
        *,
        workers: int = 1,
        storage_bits: int | None = 16,
        arena_bytes: str = "512MiB",
        store_bytes: str = "2GiB",
        pool_bytes: str = "512MiB",
        durable: bool = True,
        worker_flags: dict[str, Any] | None = None,
        daemon_flags: dict[str, Any] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvsidecar-"))
        self.model, self.workers = model, workers
        self.cache_socket = self.folder / "cache.sock"
        self._daemon_flags = {
            "socket": self.cache_socket,
            "store": self.folder / "store" if durable else "none",
            "arena_bytes": arena_bytes,
            "store_bytes": store_bytes,
            "log_level": "warning",
            **(daemon_flags or {}),
        }
        self._worker_flags = {
            "model": model,
            "cache_socket": self.cache_socket,
            **({} if storage_bits is None else {"storage_bits": storage_bits}),
            "pool_bytes": pool_bytes,
            "log_level": "warning",
            **(worker_flags or {}),
        }
        self._processes: dict[str, Process] = {}
        self._clients: dict[int, Client] = {}
        self.log = (self.folder / "log").open("ab")

    def __enter__(self) -> Node:
        try:
            self.start_daemon()
            for i in range(self.workers):
                self.start_worker(i, wait=False)
            for i in range(self.workers):
                self.wait_worker(i)
        except BaseException:  # even Ctrl-C must end the started processes
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()
        for daemon in (False, True):  # the workers end first
            ending = [process for name, process in self._processes.items() if (name == "a-daemon") == daemon]
            for process in ending:
                process.terminate()
                if not daemon:
                    process.send_signal(signal.SIGINT)  # the second signal: no gateway needs to notice the end
            for process in ending:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- processes ------------------------------------------------------------------------------------------

    def start_daemon(self, wait: bool = True) -> None:
        self._start("a-daemon", ["cache_daemon"], self._daemon_flags)
        if wait:
            self.wait_daemon()

    def wait_daemon(self) -> None:
        """Wait until the daemon serves."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.cache_stats()
                return
            except grpc.RpcError:
                self._check("a-daemon", deadline)

    def start_worker(self, i: int, wait: bool = True, **changed: Any) -> None:
        """Start a worker. Flags in ``changed`` replace the node's worker flags for this worker only."""
        socket = self.worker_socket(i)
        socket.unlink(missing_ok=True)
        flags = {**self._worker_flags, **changed, "socket": socket, "name": f"worker-{i}"}
        self._start(f"worker-{i}", ["inference_svc", "worker"], flags)
        if wait:
            self.wait_worker(i)

    def wait_worker(self, i: int) -> None:
        """Wait until a worker serves. If the daemon runs, also wait until the worker is attached to the daemon."""
        deadline = time.monotonic() + _START_SECONDS
        while not self.worker_socket(i).exists():
            self._check(f"worker-{i}", deadline)
        old = self._clients.pop(i, None)
        if old is not None:
            old.close()
        self._clients[i] = Client(self.worker_socket(i))
        self._clients[i].wait_ready(_START_SECONDS)
        if self.alive("a-daemon"):
            self.wait_attached(i)

    def wait_attached(self, i: int, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.client(i).stats().cache_attached:
            self._check(f"worker-{i}", deadline)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to ``daemon`` or ``worker-N``; after SIGKILL and SIGTERM, wait for the end of the process.

        For ``daemon``, SIGKILL and SIGTERM also end the supervisor, so that the daemon stays down. Any other signal
        goes only to the serving process.
        """
        key = "a-daemon" if name == "daemon" else name
        process, serving = self._processes[key], self.pid(name)
        if number not in (signal.SIGKILL, signal.SIGTERM):
            os.kill(serving, number)
            return
        handle = os.pidfd_open(serving)
        process.send_signal(number)
        process.wait(60)
        _wait_gone(handle, 60)
        del self._processes[key]

    def crash_daemon(self) -> None:
        """Kill only the daemon's serving process, as the OOM killer does; the supervisor restarts it."""
        serving = self.pid("daemon")
        handle = os.pidfd_open(serving)
        os.kill(serving, signal.SIGKILL)
        _wait_gone(handle, 60)

    def alive(self, name: str) -> bool:
        key = "a-daemon" if name == "daemon" else name
        return key in self._processes and self._processes[key].poll() is None

    def pid(self, name: str) -> int:
        """Return the process id of a worker, or of the daemon's serving process."""
        if name != "daemon":
            return self._processes[name].pid
        guardian, deadline = self._processes["a-daemon"].pid, time.monotonic() + 30
        while not (children := psutil.Process(guardian).children()):
            self._check("a-daemon", deadline)  # the supervisor is about to restart the process
        return children[0].pid

    def restart_worker(self, i: int) -> None:
        """Kill a worker with SIGKILL and start it again."""
        self.kill(f"worker-{i}")
        self.start_worker(i)

    def restart_daemon(self) -> None:
        """Kill the daemon with SIGKILL and start it again; return when the workers are attached."""
        self.kill("daemon")
        self.start_daemon()
        for i in range(self.workers):
            if self.alive(f"worker-{i}"):
                self.wait_attached(i)

    # ---- calls ----------------------------------------------------------------------------------------------

    def worker_socket(self, i: int) -> Path:
        return self.folder / f"worker-{i}.sock"

    def client(self, i: int = 0) -> Client:
        return self._clients[i]

    def cache_channel(self) -> grpc.Channel:
        return grpc.insecure_channel(socket_target(self.cache_socket), options=[("grpc.use_local_subchannel_pool", 1)])

    def cache_stats(self) -> cache_pb2.StatsResponse:
        with self.cache_channel() as channel:
            response: cache_pb2.StatsResponse = CacheServiceStub(channel).Stats(cache_pb2.StatsRequest(), timeout=60)
            return response

    def settle(self, seconds: float = 90.0) -> None:
        """Wait until all computed chunks are stored and durable."""
        deadline = time.monotonic() + seconds
        while True:
            stats = [self.client(i).stats() for i in range(self.workers) if self.alive(f"worker-{i}")]
            saved = all(s.pending_saves == 0 and s.running == 0 for s in stats)
            if saved and (not self.alive("daemon") or self.cache_stats().pending_writes == 0):
                return
            if time.monotonic() > deadline:
                raise TimeoutError("the node did not settle")
            time.sleep(0.01)

    def settle_stores(self, seconds: float = 60.0) -> float:
        """Wait until the daemon receives no new chunks for a while.

        Use this for engines that do not report pending stores. Returns the time of the last new chunk
        (``time.perf_counter``).
        """
        deadline, before, changed = time.monotonic() + seconds, (-1, -1), time.perf_counter()
        while True:
            stats = self.cache_stats()
            now, busy = (stats.commits, stats.chunks), stats.reservations or stats.pending_writes
            if now != before or busy:
                changed = time.perf_counter()
            elif time.perf_counter() - changed > _QUIET_SECONDS:
                return changed
            if time.monotonic() > deadline:
                raise TimeoutError("engines go on storing")
            before = now
            time.sleep(_QUIET_SECONDS / 15)

    def wait_sessions(self, count: int, seconds: float = 60.0) -> None:
        """Wait until ``count`` sessions are open. A vLLM engine opens two."""
        deadline = time.monotonic() + seconds
        while self.cache_stats().sessions < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.cache_stats().sessions} sessions of {count} came")
            time.sleep(0.05)

    def _start(self, name: str, module: list[str], flags: dict[str, Any]) -> None:
        command = list(module)
        for flag, value in flags.items():
            command += [f"--{flag.replace('_', '-')}", str(value)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSIDECAR_")}
        self._processes[name] = self.launch(command, environment, self.log.fileno())

    def _check(self, name: str, deadline: float) -> None:
        process = self._processes[name]
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with code {process.returncode}:\n{self.read_log()}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not come up:\n{self.read_log()}")
        time.sleep(0.02)

    def read_log(self, last: int = 4000) -> str:
        """Return the last characters of the common log of all processes."""
        return self._whole_log()[-last:]

    def count_in_log(self, text: str) -> int:
        """Return how many times a text occurs in the common log of all processes."""
        return self._whole_log().count(text)

    def wait_for_log(self, text: str, seconds: float = 60.0) -> list[str]:
        """Wait for log lines that contain a text, and return them. A gateway logs only after an answer's last byte."""
        deadline = time.monotonic() + seconds
        while not (found := [line for line in self._whole_log().splitlines() if text in line]):
            assert time.monotonic() < deadline, (text, self.read_log())
            time.sleep(0.02)
        return found

    def _whole_log(self) -> str:
        self.log.flush()
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")


def _wait_gone(handle: int, seconds: float) -> None:
    """Wait until a process and all of its threads have ended, then close ``handle``, the process's pidfd.

    The process need not be a child.
    """
    try:
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        if not waiting.poll(seconds * 1000):
            raise TimeoutError("a process does not end")
    finally:
        os.close(handle)
