"""Throughput of a remote worker, which reads and writes chunks over mTLS, against iperf3.

The other host is a network namespace behind a shaped link (``network_links.py``), so both ends share this machine's
cores. Every repeat measures all arms in turn:

iperf3   the capacity of the link: one unencrypted TCP connection (without iperf3, a plain socket)
tls      the same with encryption: one TLS connection between two Python processes
read     a worker's steps before it unpacks chunks: Match, Fetch, and a check of each payload's checksum
write    Reserve, Fill and Commit of the same number of bytes
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvsidecar import keys
from kvsidecar.chunk_layout import new_header
from kvsidecar.kv_transfer.chunk_writer import linked_groups, write
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection

from benchmarks import report
from benchmarks.network_links import LOOPBACK, Link, link, links_of
from benchmarks.node import Node, free_port
from benchmarks.peer import descriptor
from benchmarks.remote_shape import CHUNK_TOKENS, GEOMETRY, NAME, TOKEN_BYTES
from benchmarks.two_hosts import TlsListener

ARMS = ("iperf3", "tls", "read", "write")


class ByteSender:
    """Server that sends ``size_bytes`` to every client, after the client has sent one byte."""

    def __init__(self, host: str, size_bytes: int, context: ssl.SSLContext | None) -> None:
        self._size, self._context = size_bytes, context
        self._listener = socket.create_server((host, 0))
        self.at = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        piece = memoryview(bytes(1 << 20))
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer if self._context is None else self._context.wrap_socket(peer, server_side=True) as connection:
                connection.recv(1)
                for _ in range(self._size // len(piece)):
                    connection.sendall(piece)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class TwoHosts:
    """A daemon on this side of a link, which has stored a prompt, and a worker on the other side."""

    def __init__(self, wire: Link, tokens: int, stack: ExitStack) -> None:
        self._wire, size = wire, tokens * TOKEN_BYTES
        self.door = TlsListener(Path(stack.enter_context(TemporaryDirectory())), wire.near)
        flags = {**self.door.daemon_flags, "staging_bytes": "256MiB"}
        room = f"{3 * size + (64 << 20)}"
        self.node = stack.enter_context(Node(workers=0, durable=False, arena_bytes=room, daemon_flags=flags))
        self._store(tokens)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(flags["tls_cert"], flags["tls_key"])
        senders = [ByteSender(wire.near, size, one) for one in (None, context)]
        for sender in senders:
            stack.callback(sender.close)
        files = self.door.worker_flags
        command = [
            *wire.inside,
            sys.executable,
            "-m",
            "benchmarks.remote_host_program",
            self.door.at,
            *(s.at for s in senders),
        ]
        command += [str(files[name]) for name in ("cache_ca", "cache_cert", "cache_key")] + [str(tokens)]
        self._far = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert self._far.stdin is not None
        stack.callback(self._far.stdin.close)

    def _store(self, tokens: int) -> None:
        near = DaemonConnection(self.door.address, "near", descriptor(NAME, GEOMETRY))
        try:
            if not near.wait(10) or near.session is None:
                raise TimeoutError("the daemon does not answer")
            starts = range(0, tokens, CHUNK_TOKENS)
            headers = [new_header(GEOMETRY, list(range(start, start + CHUNK_TOKENS)), start) for start in starts]
            for group, _ in linked_groups(near.session, headers, b"", keys.tenant_root(near.namespace, b"")):
                write(near.session, b"", group, lambda _, payload: None, 60.0)
        finally:
            near.close()

    def rate(self, arm: str) -> float:
        """Run one transfer of an arm; return its bytes per second."""
        if arm == "iperf3" and shutil.which("iperf3"):
            return self._iperf3()
        assert self._far.stdin is not None
        assert self._far.stdout is not None
        print({"iperf3": "socket"}.get(arm, arm), file=self._far.stdin, flush=True)
        found = json.loads(self._far.stdout.readline() or "null")
        if found is None:
            raise RuntimeError("the worker on the other host ended; what it said is above")
        return float(found["bytes"] / found["seconds"])

    def _iperf3(self) -> float:
        said = ""
        for _ in range(5):  # try again with another server if one fails
            port = str(free_port())
            server = subprocess.Popen(
                ["iperf3", "-s", "-1", "-B", self._wire.near, "-p", port], stdout=subprocess.DEVNULL
            )
            command = [*self._wire.inside, "iperf3", "-c", self._wire.near, "-p", port, "-R", "-t", "1", "-J"]
            try:
                for _ in range(50):  # try again until the server listens
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
                    found = json.loads(done.stdout or "{}")
                    if "sum_received" in found.get("end", {}):
                        return float(found["end"]["sum_received"]["bits_per_second"]) / 8
                    said = found.get("error", done.stderr)
                    if "refused" not in said:
                        break
            finally:
                server.kill()
                server.wait()
        raise RuntimeError(f"iperf3 failed: {said}")


def run(options: argparse.Namespace) -> dict[str, Any]:
    links, rows = links_of(options.gbit), list[dict[str, Any]]()
    tokens = max(1, options.mebibytes * (1 << 20) // (TOKEN_BYTES * CHUNK_TOKENS)) * CHUNK_TOKENS
    for gbit in links:
        with ExitStack() as stack:
            wire = stack.enter_context(link(gbit)) if gbit else LOOPBACK
            hosts = TwoHosts(wire, tokens, stack)
            rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for repeat in range(options.repeats + 1):
                for arm in ARMS:
                    found = hosts.rate(arm)
                    if repeat:  # the first repeat is a warm-up
                        rates[arm].append(found)
            stats = hosts.node.cache_stats()
            if stats.leases or stats.reservations:
                raise RuntimeError(f"{stats.leases} leases and {stats.reservations} reservations were left")
        rows += [
            {
                "link_gbit": gbit,
                "arm": arm,
                **report.figure([rate / 1e6 for rate in rates[arm]], "megabytes_per_second"),
                "of_iperf3": round(report.median(rates[arm]) / report.median(rates["iperf3"]), 3),
            }
            for arm in ARMS
        ]
    summary: dict[str, Any] = {"iperf3": bool(shutil.which("iperf3"))}
    for row in rows:
        if row["arm"] in ("read", "write"):
            summary[f"{row['arm']}_over_iperf3_{row['link_gbit']:g}gbit"] = row["of_iperf3"]
    return report.write(options, "remote_reads", rows, summary)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("remote_reads", __doc__ or "")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0], help="link speeds; 0: loopback")
    parser.add_argument("--mebibytes", type=report.at_least(1), default=128, help="size of each transfer")
    parser.add_argument("--repeats", type=report.at_least(1), default=5)
    options = parser.parse_args(arguments)
    if options.quick:
        options.gbit, options.mebibytes, options.repeats = [1.0], 32, 2
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
