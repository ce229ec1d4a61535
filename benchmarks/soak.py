"""Soak test: memory, store size and p99 of Match over time, under a mixed load that evicts chunks.

The benchmark kills no process. It leaves out the first sixth of the run (ten minutes of an hour). A measure is flat if
a straight line through its other samples rises by at most ``--rise-mb``. Match is stable if its p99 in the last sixth
is at most 1.25 times its p99 in the second sixth.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from kvsidecar.byte_sizes import parse_size

from benchmarks import report
from benchmarks.chaos.victim_load import CHUNK_TOKENS, prompt
from benchmarks.node import Node
from benchmarks.peer import Peer

_ALLOWED_P99, _ALLOWED_FILE = 1.25, 1.5
_SESSION_SECONDS = 60.0
_PARTS = 6
# Maximum number of rows; in a run of an hour, each row covers a minute.
_ROWS = 60
_LAST = ("at_s", "chunks", "arena_evictions", "durable_evictions")


class Worker:
    """Thread that runs one client after another, because real sessions start and end, too."""

    def __init__(self, node: Node, seed: int, prompts: int) -> None:
        self._node, self._rng, self._prompts = node, random.Random(seed), prompts
        self.waits_ms: list[float] = []
        self.wrong = self.reads = self.writes = 0
        self.errors: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def taken(self) -> list[float]:
        """Return the durations of the Match calls since the previous call of this method, in milliseconds."""
        taken, self.waits_ms = self.waits_ms, []
        return taken

    def _run(self) -> None:
        try:
            self._send()
        except Exception as error:
            self.errors.append(f"a client's thread ended: {error!r}"[:200])

    def _send(self) -> None:
        while not self._over.is_set():
            try:
                peer = Peer(self._node)
            except (grpc.RpcError, OSError) as error:
                self.errors.append(str(error)[:200])
                self._over.wait(1)
                continue
            try:
                self._use(peer)
            finally:
                peer.close()

    def _use(self, peer: Peer) -> None:
        until = time.monotonic() + _SESSION_SECONDS
        while time.monotonic() < until and not self._over.is_set():
            try:
                self._work(peer)
            except grpc.RpcError as error:
                self.errors.append(str(error)[:200])

    def _work(self, peer: Peer) -> None:
        # Some prompts occur many times, others only once.
        n = int(self._rng.paretovariate(0.6)) % self._prompts
        salt = self._rng.choice((b"", b"", b"tenant"))
        ids = prompt(n)
        if self._rng.random() < 0.5:
            self.writes += peer.try_put(ids, CHUNK_TOKENS, salt)
        began = time.perf_counter()
        found = peer.match(ids, salt)
        self.waits_ms.append((time.perf_counter() - began) * 1e3)
        self.wrong += not peer.is_right(ids, found)
        peer.release(found)
        self.reads += 1
        time.sleep(0.005)


def rise(samples: list[tuple[float, float]]) -> float:
    """Fit a straight line to ``(time, value)`` samples; return its rise from the first to the last time."""
    if len(samples) < 2:
        return 0.0
    at, values = np.array(samples).T
    slope = np.polyfit(at - at[0], values, 1)[0]
    return float(slope * (at[-1] - at[0]))


def thin_samples(rows: list[dict[str, Any]], most: int = _ROWS) -> list[dict[str, Any]]:
    """Reduce the rows to at most ``most`` by merging groups of equal size.

    A merged row has the last value of each counter, the sum of the matches, and the maximum of every other column.
    """
    each = -(-len(rows) // most)
    groups = [rows[i : i + each] for i in range(0, len(rows), each or 1)]
    return [{name: _of(name, [row[name] for row in group]) for name in group[0]} for group in groups]


def _of(name: str, values: list[Any]) -> Any:
    return values[-1] if name in _LAST else sum(values) if name == "matches" else max(values)


def run(options: argparse.Namespace) -> dict[str, Any]:
    seconds, rows = options.minutes * 60.0, []
    waits = [array("f") for _ in range(_PARTS)]  # arrays, because the memory of this process is measured, too
    flags = {"staging_bytes": "8MiB"}
    budget = parse_size(options.store_bytes)
    with (
        Node(workers=0, arena_bytes=options.arena_bytes, store_bytes=options.store_bytes, daemon_flags=flags) as node,
        report.progress() as progress,
    ):
        workers = [Worker(node, options.seed + i, options.prompts) for i in range(options.peers)]
        watched = {"daemon": psutil.Process(node.pid("daemon")), "peers": psutil.Process(os.getpid())}
        data: Path = node.folder / "store" / "data.mdb"
        task, began = progress.add_task("running", total=seconds), time.monotonic()
        try:
            while (now := time.monotonic() - began) < seconds:
                time.sleep(min(options.every, max(0.1, seconds - now)))
                at = time.monotonic() - began
                taken = [ms for worker in workers for ms in worker.taken()]
                waits[min(_PARTS - 1, int(at / seconds * _PARTS))].extend(taken)
                stats = node.cache_stats()
                memory = {f"{name}_rss_mb": process.memory_info().rss / 1e6 for name, process in watched.items()}
                rows.append(
                    {
                        "at_s": round(at, 1),
                        **{name: round(value, 1) for name, value in memory.items()},
                        "file_mb": round(data.stat().st_blocks * 512 / 1e6, 2),
                        "match_p99_ms": round(report.p99(taken), 2),
                        "matches": len(taken),
                        "chunks": stats.chunks,
                        "arena_evictions": stats.arena_evictions,
                        "durable_evictions": stats.durable_evictions,
                        "loop_stall_ms": round(stats.loop_stall_ms, 1),
                    }
                )
                progress.update(task, completed=at)
        finally:
            for worker in workers:
                worker.close()
        end = node.cache_stats()
    summary: dict[str, Any] = {"minutes": options.minutes, "matches": sum(map(len, waits))}
    for name in memory:
        risen = rise([(r["at_s"], r[name]) for r in rows if r["at_s"] >= seconds / _PARTS])
        summary[f"{name}_rise"], summary[f"{name}_flat"] = round(risen, 2), risen <= options.rise_mb
    file_mb = max(r["file_mb"] for r in rows)
    second, last = report.p99(waits[1]), report.p99(waits[-1])
    summary |= {
        "file_of_budget": round(file_mb * 1e6 / budget, 3),
        "file_kept": file_mb * 1e6 <= _ALLOWED_FILE * budget,
        "match_p99_ms_second_sixth": round(second, 2),
        "match_p99_ms_last_sixth": round(last, 2),
        "match_p99_stable": last <= _ALLOWED_P99 * second,
        "durable_evictions": int(end.durable_evictions),
        "arena_evictions": int(end.arena_evictions),
        "wrong_answers": sum(w.wrong for w in workers),
        "failed_requests": sum(len(w.errors) for w in workers),
        "reasons": sorted({text for w in workers for text in w.errors})[:3],
        "leaked": int(end.leases + end.reservations),
    }
    return report.write(options, "soak", thin_samples(rows), summary)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("soak", __doc__ or "")
    parser.add_argument("--minutes", type=report.positive, default=60.0)
    parser.add_argument("--peers", type=report.at_least(1), default=4)
    parser.add_argument("--prompts", type=report.at_least(1), default=50_000, help="number of distinct prompts")
    parser.add_argument("--arena-bytes", default="8MiB")
    parser.add_argument("--store-bytes", default="32MiB")
    parser.add_argument("--every", type=report.positive, default=10.0, help="seconds between samples")
    parser.add_argument("--rise-mb", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.minutes, options.every = 1.0, 5.0
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
