"""Real faults: processes killed and stopped under load, damaged stores, full disks.

The table has a row for each kind of fault.

wrong_answers        reads of bytes that were never committed, and refusals that did not happen
leaked_slots         leases, reservations and arena pages without an owner after the fault
lost_durable_chunks  chunks that the daemon reported as durable and does not find after a kill; only on nodes that do
                     not evict (every other node evicts)
failed_requests      requests that failed although all processes that they need were up
recovery_ms          time from the kill to the first successful Match, including the start of the process; the summary
                     covers all kills of the daemon, with and without its supervisor
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvsidecar.errors import KVSidecarError

from benchmarks import report
from benchmarks.chaos.attacks import KINDS, PROMPTS, FaultScenario, RoundOutcome, small_disk
from benchmarks.chaos.victim_load import VictimLoad
from benchmarks.condition_wait import until
from benchmarks.node import Node
from benchmarks.peer import Peer

# Number of rounds per kind, relative to one round of the other kinds. Kills get most rounds: they fail in most ways.
_SHARES = {"kill_daemon": 10, "kill_daemon_and_supervisor": 4, "stop_writer": 4, "kill_client": 3, "stop_daemon": 3}
_ROUNDS_OF_A_NODE = 40
_WORKER_PROMPT, _WORKER_TOKENS = 300, 16


def rounds_of(total: int) -> list[str]:
    """Return the kinds of all rounds in random order, each as often as its share says and at least once."""
    weights = {kind: _SHARES.get(kind, 1) for kind in KINDS}
    whole = sum(weights.values())
    out = [kind for kind, weight in weights.items() for _ in range(max(1, round(total * weight / whole)))]
    random.Random(1).shuffle(out)
    return out


def run(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    found: dict[str, list[RoundOutcome]] = defaultdict(list)
    reasons: list[str] = []
    todo = rounds_of(options.rounds)
    with report.progress() as progress:
        task = progress.add_task("rounds", total=len(todo) + 1 + options.worker_rounds)
        for begin in range(0, len(todo), _ROUNDS_OF_A_NODE):
            # Every other node evicts, because its store is smaller than the load's chunks.
            evicting = begin // _ROUNDS_OF_A_NODE % 2 == 1
            flags = {"heartbeat_ms": 200, "store_bytes": "4MiB" if evicting else "256MiB", "staging_bytes": "4MiB"}
            with Node(workers=0, arena_bytes="6MiB", daemon_flags=flags) as node:
                load = VictimLoad(node, options.peers, PROMPTS, rng.randrange(1 << 30))
                scene = FaultScenario(node, load, rng, evicts=evicting)
                try:
                    for kind in todo[begin : begin + _ROUNDS_OF_A_NODE]:
                        found[kind].append(one(kind, scene))
                        progress.advance(task)
                finally:
                    load.close()
                    reasons += load.reasons
                    if scene.writer is not None:
                        scene.writer.kill()
                        scene.writer.wait()
        found["full_disk_heals"] += full_disk()
        progress.advance(task)
        for kind, outcome in of_workers(options.worker_rounds, rng):
            found[kind].append(outcome)
            progress.advance(task)
    rows = [row(kind, outcomes) for kind, outcomes in found.items()]
    summary: dict[str, Any] = {
        name: sum(r[name] for r in rows)
        for name in ("rounds", "wrong_answers", "leaked_slots", "lost_durable_chunks", "failed_requests")
    }
    kinds = ("kill_daemon", "kill_daemon_and_supervisor")
    kills = [o.recovery_ms for kind in kinds for o in found[kind] if o.recovery_ms is not None]
    summary["recovery_ms_p50"] = report.median(kills)
    summary["recovery_ms_p99"] = round(report.p99(kills), 1)
    summary["reasons"] = sorted(set(reasons))[:5]
    return report.write(options, "faults", rows, summary)


def one(kind: str, scene: FaultScenario) -> RoundOutcome:
    """Run one round; return its outcome."""
    wrong, failed = scene.load.wrong, scene.load.failed
    outcome = KINDS[kind](scene)
    scene.let_run()
    outcome.leaked += scene.leaked()
    outcome.wrong += scene.load.wrong - wrong
    outcome.failed += scene.load.failed - failed
    return outcome


def row(kind: str, outcomes: list[RoundOutcome]) -> dict[str, Any]:
    recoveries = [o.recovery_ms for o in outcomes if o.recovery_ms is not None]
    return {
        "fault": kind,
        "rounds": len(outcomes),
        "wrong_answers": sum(o.wrong for o in outcomes),
        "leaked_slots": sum(o.leaked for o in outcomes),
        "lost_durable_chunks": sum(o.lost for o in outcomes),
        "failed_requests": sum(o.failed for o in outcomes),
        "recovery_ms_p99": round(report.p99(recoveries), 1) if recoveries else None,
    }


def full_disk() -> list[RoundOutcome]:
    """Fill the disk: the arena must still serve, later chunks must become durable, and durable chunks must stay."""
    with tempfile.TemporaryDirectory(prefix="kvsidecar-disk-") as folder, small_disk(Path(folder), "2m") as mounted:
        if not mounted:
            report.console.print("full_disk_heals is left out: mounting a small tmpfs needs root")
            return []
        with Node(workers=0, arena_bytes="64MiB", daemon_flags={"store": Path(folder) / "store"}) as node:
            peer, outcome = Peer(node), RoundOutcome()
            stored = [[n] * 400 for n in range(100)]
            for ids in stored:
                peer.try_put(ids, 400)
            until(lambda: bool(peer.stats().failed_writes), 20.0)
            outcome.wrong += sum(peer.read(ids) != 400 for ids in stored)
            began = time.monotonic()
            subprocess.run(["mount", "-o", "remount,size=256m", folder], check=True)
            fresh = peer.put([1000] * 400)
            until(lambda: any(c.durable for c in peer.list_all() if c.prefix_hash == fresh), 60)
            outcome.recovery_ms = (time.monotonic() - began) * 1e3
            until(lambda: not peer.stats().durable_failing, 60)
            outcome.wrong += sum(peer.read(ids) != 400 for ids in stored)
            node.settle()
            durable = {c.prefix_hash for c in peer.list_all() if c.durable}
            peer.close()
            node.kill("daemon")
            node.start_daemon()
            peer = Peer(node)
            outcome.lost = len(durable - {c.prefix_hash for c in peer.list_all()})
            outcome.wrong += sum(peer.read(ids) not in (0, 400) for ids in stored)
            peer.close()
            return [outcome]


def of_workers(rounds: int, rng: random.Random) -> list[tuple[str, RoundOutcome]]:
    """Kill a real worker, the daemon, or both. Greedy answers must not change."""
    if not rounds:
        return []
    out = []
    with Node("demo", arena_bytes="128MiB", pool_bytes="64MiB") as node:
        prompts = [[rng.randrange(16, 4000) for _ in range(_WORKER_PROMPT)] for _ in range(4)]

        def answers() -> list[list[int]]:
            made = [node.client().generate(p, max_tokens=_WORKER_TOKENS, temperature=0) for p in prompts]
            return [list(one.token_ids) for one in made]

        expected = answers()
        for n in range(rounds):
            kind = ("kill_worker", "kill_worker_and_daemon", "kill_daemon_of_worker")[n % 3]
            node.settle()
            outcome, began = RoundOutcome(), time.monotonic()
            if kind != "kill_daemon_of_worker":
                node.kill("worker-0")
            if kind != "kill_worker":
                node.kill("daemon")
            try:
                if kind == "kill_daemon_of_worker":  # the cache must never fail a request
                    outcome.wrong += answers() != expected
                if kind != "kill_worker":
                    node.start_daemon()
                if kind != "kill_daemon_of_worker":
                    node.start_worker(0)
                node.wait_attached(0)
                outcome.recovery_ms = (time.monotonic() - began) * 1e3
                outcome.wrong += answers() != expected
            except KVSidecarError:
                outcome.failed += 1
            node.settle()
            stats = node.cache_stats()
            outcome.leaked = int(stats.leases + stats.reservations)
            out.append((kind, outcome))
    return out


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("faults", __doc__ or "")
    parser.add_argument("--rounds", type=report.at_least(1), default=500)
    parser.add_argument("--worker-rounds", type=int, default=12, help="rounds with real workers")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.worker_rounds = 30, 3
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
