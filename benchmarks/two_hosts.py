"""Daemon with an mTLS listener, and workers that attach from another host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvsidecar.net.channel import ServiceAddress

from benchmarks.certificate_authority import CertificateAuthority
from benchmarks.network_links import Link
from benchmarks.node import Node, Process, free_port


class TlsListener:
    """Address and certificates of a daemon's mTLS listener, as flags for daemon and workers."""

    def __init__(self, folder: Path, host: str) -> None:
        authority = CertificateAuthority(folder)
        server, self._worker = authority.issue("server", hosts=(host,)), authority.issue("worker")
        self._ca, self.at = authority.ca, f"{host}:{free_port()}"
        self.daemon_flags: dict[str, Any] = {
            "tcp": self.at,
            "tls_cert": server.certificate,
            "tls_key": server.key,
            "tls_client_ca": authority.ca,
        }

    @property
    def address(self) -> ServiceAddress:
        return ServiceAddress.remote(self.at, None, self._ca, self._worker.certificate, self._worker.key)

    @property
    def worker_flags(self) -> dict[str, Any]:
        return {
            "cache_socket": "none",
            "cache_address": self.at,
            "cache_ca": self._ca,
            "cache_cert": self._worker.certificate,
            "cache_key": self._worker.key,
        }


class RemoteWorkers(Node):
    """Workers on the other side of a link, which use a daemon on this side."""

    def __init__(self, link: Link, door: TlsListener, model: str = "demo", **flags: Any) -> None:
        super().__init__(model, worker_flags={**door.worker_flags, **flags})

        def launch(command: list[str], environment: dict[str, str], log: int) -> Process:
            whole = [*link.inside, sys.executable, "-m", *command]
            return subprocess.Popen(whole, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL)

        self.launch = launch  # type: ignore[misc]  # of this one alone

    def start_daemon(self, wait: bool = True) -> None:
        """Do nothing: these workers use the daemon of another node."""


@contextmanager
def two_hosts(link: Link, model: str = "demo", **flags: Any) -> Iterator[tuple[Node, RemoteWorkers]]:
    """Start a node here, and a worker on the other host that is attached to the node's daemon.

    Both workers get ``flags``.
    """
    with ExitStack() as stack:
        door = TlsListener(Path(stack.enter_context(TemporaryDirectory())), link.near)
        here = stack.enter_context(Node(model, daemon_flags=door.daemon_flags, worker_flags=flags))
        there = stack.enter_context(RemoteWorkers(link, door, model, **flags))
        there.wait_attached(0)
        yield here, there
