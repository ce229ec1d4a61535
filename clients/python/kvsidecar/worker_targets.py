"""Workers that a client may call: the worker of its address, or all workers of the node; retries among them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsidecar.errors import Cancelled
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvsidecar.net.addresses import socket_path
from kvsidecar.process.runtime_dir import own_runtime_dir, socket_target


def default_target() -> str:
    """Return the target of the first worker of ``kvsidecar serve``."""
    return socket_target(own_runtime_dir() / "worker-0.sock")


def target_of(address: str | Path | None) -> str:
    """Return the gRPC target of a socket path or of ``host:port``; None selects the default target."""
    if address is None:
        return default_target()
    path = socket_path(address)
    return str(address) if path is None else socket_target(path)


class WorkerChannels:
    """Channels to the workers, and the current one. Thread-safe.

    A channel stays open until the client is closed, because other threads may wait for an answer on it. The client
    closes the channels that ``close`` returns.
    """

    def __init__(self, address: str | Path | None, connect: Callable[[str], Any]) -> None:
        self._address, self._connect = address, connect
        self._lock = threading.Lock()
        self.closed = False
        self.now = target_of(address)
        self.channels: dict[str, Any] = {self.now: connect(self.now)}
        self._stubs: dict[str, Any] = {self.now: InferenceServiceStub(self.channels[self.now])}

    @property
    def stub(self) -> Any:
        return self._stubs[self.now]

    def stub_of(self, target: str) -> Any:
        """Return the stub of the current worker or of an earlier worker."""
        return self._stubs[target]

    def close(self) -> list[Any]:
        """Stop further calls and retries; return all channels."""
        with self._lock:
            self.closed = True
            return list(self.channels.values())

    def another(self, tried: set[str]) -> bool:
        """Switch to an untried worker; return whether there is one. Raises Cancelled if the client is closed."""
        with self._lock:
            self.refuse_if_closed()
            if self.now not in tried:  # another thread has already switched
                return True
            left = [target for target in self._all() if target not in tried]
            if not left:
                return False
            if left[0] not in self.channels:
                self.channels[left[0]] = self._connect(left[0])
                self._stubs[left[0]] = InferenceServiceStub(self.channels[left[0]])
            self.now = left[0]
            return True

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise Cancelled("the client is closed")

    def _all(self) -> list[str]:
        if self._address is not None:
            return [self.now]
        found = own_runtime_dir().glob("worker-*.sock")
        return [socket_target(path) for path in sorted(found, key=lambda path: (len(path.name), path.name))]


class RetryState:
    """Retry state of one request: the workers tried, and the time left."""

    def __init__(self, workers: WorkerChannels, deadline: float | None) -> None:
        self._workers, self._tried, self._asked = workers, set[str](), ""
        self._until = None if deadline is None else time.monotonic() + deadline

    def stub(self) -> Any:
        self._workers.refuse_if_closed()
        self._asked = self._workers.now
        return self._workers.stub_of(self._asked)

    def left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def again(self) -> bool:
        """Record the current worker as unavailable; return whether there is another worker to try."""
        self._tried.add(self._asked)
        return self._workers.another(self._tried)
