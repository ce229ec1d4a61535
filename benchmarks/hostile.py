"""Isolation under attack: a hostile guest beside a well-behaved client of one daemon.

The guest (``benchmarks.chaos.hostile_guest``) attacks from a separate process with all messages that a caller at the
shared socket can send. The client sends a hundred Match calls per second, for prompts that it has stored.

match_p99_ms       p99 of the client's Match calls, in wall time
internal           calls that failed with INTERNAL
above_budgets_mib  peak memory of the daemon, minus its idle memory, its arena, and one staging area for each caller
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks import report
from benchmarks.node import Node
from benchmarks.peer import Peer

_MEBIBYTE = 1 << 20
_ARENA, _STAGING = 32 * _MEBIBYTE, 16 * _MEBIBYTE
_PROMPTS, _CHUNKS, _CHUNK_TOKENS = 8, 4, 64
_PAUSE_SECONDS, _LOOK_SECONDS = 0.01, 0.1
_MIN_MATCHES, _MAX_SECONDS = 25, 120.0


class MeasuredClient:
    """Client that measures its Match calls. It stores a prompt again if the daemon has evicted the prompt."""

    def __init__(self, node: Node) -> None:
        self.peer = Peer(node)
        self.match_ms: list[float] = []
        self.failed: Counter[str] = Counter()
        self.wrong = self.found = 0

    def step(self, number: int) -> None:
        ids = [(number % _PROMPTS) * 10_000 + n for n in range(_CHUNKS * _CHUNK_TOKENS)]
        try:
            began = time.perf_counter()
            found = self.peer.match(ids)
            self.match_ms.append((time.perf_counter() - began) * 1e3)
            self.wrong += not self.peer.is_right(ids, found)
            self.found += found.matched_tokens == len(ids)
            self.peer.release(found)
            if found.matched_tokens < len(ids):
                self.peer.try_put(ids, _CHUNK_TOKENS)
        except grpc.RpcError as error:
            known: Any = error
            self.failed[known.code().name] += 1


class MemoryMonitor(threading.Thread):
    """Thread that records the daemon's peak memory."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._process, self._over = process, threading.Event()
        self.idle = self.most = process.memory_info().rss

    def run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self.most = max(self.most, self._process.memory_info().rss)

    def close(self) -> None:
        self._over.set()
        self.join()


def measure(seconds: float, *, hostile: bool) -> dict[str, Any]:
    """Measure a daemon and its client for ``seconds``, with or without the guest.

    A slow machine measures longer, until the client has made ``_MIN_MATCHES`` calls, but at most ``_MAX_SECONDS``.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hostile-") as folder,
        Node(
            workers=0,
            arena_bytes=str(_ARENA),
            store_bytes="64MiB",
            daemon_flags={"staging_bytes": str(_STAGING), "shared_socket": Path(folder) / "shared.sock"},
        ) as node,
    ):
        shared = Path(folder) / "shared.sock"
        memory = MemoryMonitor(psutil.Process(node.pid("daemon")))
        memory.start()
        client, told = MeasuredClient(node), "{}"
        command = [sys.executable, "-m", "benchmarks.chaos.hostile_guest", str(shared)]
        guest = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) if hostile else None
        try:
            if guest is not None and guest.stdout is not None:
                guest.stdout.readline()  # the guest's first line says that the attack begins
            began, number = time.monotonic(), 0
            while (passed := time.monotonic() - began) < seconds or (number < _MIN_MATCHES and passed < _MAX_SECONDS):
                client.step(number := number + 1)
                time.sleep(_PAUSE_SECONDS)
        finally:
            if guest is not None:
                told = _last_words(guest)
        memory.close()
        internal = node.count_in_log("a call failed") + client.failed["INTERNAL"]
        client.peer.close()
        return {
            "hostile": hostile,
            "seconds": round(passed, 1),
            "matches": len(client.match_ms),
            **report.figure(client.match_ms, "match_p50_ms"),
            "match_p99_ms": round(report.p99(client.match_ms), 2),
            "match_max_ms": round(max(client.match_ms), 1),
            "hit_share": round(client.found / max(1, len(client.match_ms)), 3),
            "wrong": client.wrong,
            "failed": dict(client.failed),
            "failed_calls": client.failed.total(),
            "internal": internal,
            "above_budgets_mib": round((memory.most - memory.idle - _ARENA - 2 * _STAGING) / _MEBIBYTE, 1),
            "guest": json.loads(told),
        }


def _last_words(guest: subprocess.Popen[str]) -> str:
    """End the guest by closing its input; return its output. Kill it if it does not end."""
    try:
        return guest.communicate("", timeout=120)[0]
    finally:
        guest.kill()


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows = [measure(min(options.seconds, 30.0), hostile=False), measure(options.seconds, hostile=True)]
    return report.write(options, "hostile", rows, {k: v for k, v in rows[-1].items() if not isinstance(v, dict)})


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("hostile", __doc__ or "")
    parser.add_argument("--seconds", type=report.positive, default=600.0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds = 30.0
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
