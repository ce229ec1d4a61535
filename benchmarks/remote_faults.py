"""Faults of the remote tier under load: two nodes with workers, and a faulty network.

Each node has its own network path to one Valkey (``proxy.py``). The nodes' caches are so small that most reads come
from the Valkey. Every fault lasts ``--seconds``; afterwards, node B must find the chunks that node A stores. Every
prompt is a known document and a new question. Each answer is compared with the answer to the same prompt without the
cache (greedy, 16-bit storage). With ``--out``, an interrupted run resumes with the next fault.

killed   the server gets SIGKILL
hung     the server gets SIGSTOP
full     the server has no memory left
slow     packets to the server have a delay of 200 ms and a loss of 5 %, if the server can be on a separate host and the
         kernel has ``netem``; otherwise every piece of the server's data comes 200 ms late
garbage  the server's data is replaced by random bytes
foreign  five times a second, a stored value is replaced: by another chunk's value, by one of another format version, by
         a truncated value, or by one with a flipped bit
cut      every connection is closed at once
apart    the network of one node is down
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsidecar.errors import KVSidecarError

from benchmarks import report
from benchmarks.checkpointed_results import CheckpointedResults
from benchmarks.condition_wait import until
from benchmarks.network_links import LOOPBACK, impaired, link, why_none
from benchmarks.node import Node
from benchmarks.proxy import Proxy
from benchmarks.remote_servers import RedisServer, why_no_valkey

DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 12, 512, 24, 4
_ALLOWED_RECOVERY = 5.0
_DELAY_SECONDS, _LOSS, _GBIT = 0.2, "5%", 10.0
_PAUSE_SECONDS, _LATEST_SECONDS, _DEADLINE_SECONDS = 0.2, 120.0, 120.0


@dataclass
class ClientResults:
    """Results of one node's client."""

    requests: int = 0
    wrong: int = 0
    failed: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)


class FaultScenario:
    """Two nodes, their network paths, and the server. Each node has a client, which sends requests until the end."""

    def __init__(self, model: str, seed: int, stack: ExitStack) -> None:
        self._rng = random.Random(seed)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.at = LOOPBACK
        if not why_none():
            with suppress(RuntimeError):
                self.at = stack.enter_context(link(_GBIT))
        flags = ("--protected-mode", "no")
        self.server = stack.enter_context(RedisServer(folder, flags, host=self.at.host, inside=self.at.inside))
        self.networks = [Proxy(self.server.port, host=self.at.host) for _ in range(2)]
        self.nodes: list[Node] = []
        for network in self.networks:
            stack.callback(network.close)
            node = Node(
                model,
                arena_bytes="24MiB",
                durable=False,
                daemon_flags={"remote": f"redis://127.0.0.1:{network.port}", "remote_write": "all"},
                worker_flags={"resident_sequences": 0},
            )
            self.nodes.append(stack.enter_context(node))
        self.documents = [self.fresh(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        self.seen = [ClientResults(), ClientResults()]
        self._over = threading.Event()
        self._clients = [threading.Thread(target=self._ask_on, args=(i, seed + i)) for i in range(2)]
        stack.callback(self._stop)

    def start(self) -> None:
        """Store all documents in the tier, then start the clients."""
        until(lambda: not any(node.cache_stats().remote_failing for node in self.nodes), _LATEST_SECONDS)
        for document in self.documents:
            self.nodes[0].client().generate(document, max_tokens=1, deadline=_DEADLINE_SECONDS)
            self.settle()
        for client in self._clients:
            client.start()

    def _stop(self) -> None:
        self._over.set()
        for client in self._clients:
            if client.is_alive():
                client.join()

    def settle(self) -> None:
        """Wait until all of A's chunks are in the tier, or A reports that the tier fails."""
        self.nodes[0].settle()
        until(
            lambda: (stats := self.nodes[0].cache_stats()).remote_pending == 0 or bool(stats.remote_failing),
            _LATEST_SECONDS,
        )

    def fresh(self, tokens: int) -> list[int]:
        return [self._rng.randrange(16, 4000) for _ in range(tokens)]

    def _ask_on(self, i: int, seed: int) -> None:
        rng, client = random.Random(seed), self.nodes[i].client()
        while not self._over.is_set():
            prompt = rng.choice(self.documents) + [rng.randrange(16, 4000) for _ in range(QUESTION_TOKENS)]
            seen = self.seen[i]
            try:
                found, plain = (
                    client.generate(
                        prompt, max_tokens=ANSWER_TOKENS, temperature=0, skip_cache=skip, deadline=_DEADLINE_SECONDS
                    )
                    for skip in (False, True)
                )
            except KVSidecarError as error:
                seen.failed += 1
                seen.reasons.add(str(error))
                continue
            seen.requests += 1
            seen.wrong += found.token_ids != plain.token_ids
            seen.ttft_ms.append(found.ttft_ms)
            seen.plain_ms.append(plain.ttft_ms)

    def works(self) -> bool:
        """Let A compute a new document; return True if B finds its chunks in the tier."""
        prompt = self.fresh(DOCUMENT_TOKENS)
        self.nodes[0].client().generate(prompt, max_tokens=1, deadline=_DEADLINE_SECONDS)
        self.settle()
        found = self.nodes[1].client().generate([*prompt, 17], max_tokens=1, deadline=_DEADLINE_SECONDS)
        return found.cached_tokens > DOCUMENT_TOKENS // 2


# ---- faults -------------------------------------------------------------------------------------------------


@contextmanager
def _killed(scene: FaultScenario) -> Iterator[None]:
    scene.server.stop()
    yield
    scene.server.start()


@contextmanager
def _hung(scene: FaultScenario) -> Iterator[None]:
    scene.server.send(signal.SIGSTOP)
    yield
    scene.server.send(signal.SIGCONT)


@contextmanager
def _full(scene: FaultScenario) -> Iterator[None]:
    scene.server.command("CONFIG", "SET", "maxmemory", "1mb")
    yield
    scene.server.command("CONFIG", "SET", "maxmemory", "0")


@contextmanager
def _slow(scene: FaultScenario) -> Iterator[None]:
    with impaired(scene.at, "delay", f"{_DELAY_SECONDS}s", "loss", _LOSS) as done:
        for network in scene.networks:
            network.delay_seconds = 0.0 if done else _DELAY_SECONDS
        yield
    for network in scene.networks:
        network.go_on()


@contextmanager
def _garbage(scene: FaultScenario) -> Iterator[None]:
    for network in scene.networks:
        network.garbage = True
    yield
    for network in scene.networks:
        network.go_on()


@contextmanager
def _cut(scene: FaultScenario) -> Iterator[None]:
    for network in scene.networks:
        network.cut()
    yield
    for network in scene.networks:
        network.go_on()


@contextmanager
def _apart(scene: FaultScenario) -> Iterator[None]:
    scene.networks[1].hang()
    yield
    scene.networks[1].go_on()


@contextmanager
def _foreign(scene: FaultScenario) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=_replacing, args=(scene.server, over, random.Random(1)))
    thread.start()
    yield
    over.set()
    thread.join()


def _replacing(server: RedisServer, over: threading.Event, rng: random.Random) -> None:
    """Replace random values in the server by wrong values until ``over`` is set."""
    while not over.wait(_PAUSE_SECONDS):
        names = [name for name in server.names() if not name.endswith("mark")]
        if len(names) < 2:
            continue
        victim, other = rng.sample(names, 2)
        value = bytearray(server.command("GET", victim) or b"")
        if not value:
            continue
        kind = rng.randrange(4)
        if kind == 0:  # the value of another chunk; a value does not contain the chunk's name
            value = bytearray(server.command("GET", other) or b"x")
        elif kind == 1:
            value[4] ^= 0xFF  # the version of the record format
        elif kind == 2:
            del value[len(value) // 2 :]
        else:
            value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        server.command("SET", victim, bytes(value))


FAULTS: dict[str, Callable[[FaultScenario], Any]] = {
    "killed": _killed,
    "hung": _hung,
    "full": _full,
    "slow": _slow,
    "garbage": _garbage,
    "foreign": _foreign,
    "cut": _cut,
    "apart": _apart,
}


# ---- the run ------------------------------------------------------------------------------------------------


def one(scene: FaultScenario, fault: str, seconds: float) -> dict[str, Any]:
    """Inject a fault, wait until both nodes use the tier again, and return the fault's row."""
    scene.seen[:] = [ClientResults(), ClientResults()]
    before, began = [node.cache_stats() for node in scene.nodes], time.monotonic()
    with FAULTS[fault](scene):
        # The fault lasts until each client has completed a request, even on a slow machine.
        until(
            lambda: time.monotonic() - began >= seconds and all(s.requests + s.failed for s in scene.seen),
            seconds + _LATEST_SECONDS,
        )
        during = list(scene.seen)
        scene.seen[:] = [ClientResults(), ClientResults()]
    over = time.monotonic()
    until(lambda: not any(node.cache_stats().remote_failing for node in scene.nodes), _LATEST_SECONDS)
    answering = time.monotonic() - over
    until(scene.works, _LATEST_SECONDS)
    after, now = list(scene.seen), [node.cache_stats() for node in scene.nodes]

    def counted(name: str) -> int:
        return sum(getattr(n, name) - getattr(b, name) for n, b in zip(now, before, strict=True))

    ttft, plain = ([ms for seen in during for ms in getattr(seen, name)] for name in ("ttft_ms", "plain_ms"))
    return {
        "fault": fault,
        "seconds": round(over - began, 1),
        "requests": sum(seen.requests for seen in during),
        "wrong_answers": sum(seen.wrong for seen in (*during, *after)),
        "failed_requests": sum(seen.failed for seen in (*during, *after)),
        "ttft_over_nocache": round(report.median(ttft) / report.median(plain), 3) if ttft else 0.0,
        "remote_tokens": counted("remote_tokens"),
        "rejected": counted("remote_rejected"),
        "recovery_ms": round(answering * 1e3, 1),
        "found_again_ms": round((time.monotonic() - over) * 1e3, 1),
        "reasons": "; ".join(sorted({reason for seen in (*during, *after) for reason in seen.reasons}))[:200],
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    why = why_no_valkey()
    if why:
        report.console.print(f"[yellow]not run: {why}[/yellow]")
        return {}
    kept = CheckpointedResults(options.out.with_suffix(".partial.jsonl") if options.out else None, options)
    done = dict(kept.read())
    kept.write(list(done.items()))
    todo = [fault for fault in options.faults if (fault, 0) not in done]
    with report.progress() as progress, ExitStack() as stack:
        task = progress.add_task("faults", total=len(todo))
        if todo:
            scene = FaultScenario(options.model, options.seed, stack)
            scene.start()
        for fault in todo:
            done[fault, 0] = {"row": one(scene, fault, options.seconds)}
            kept.add((fault, 0), done[fault, 0])
            progress.advance(task)
    rows = [done[fault, 0]["row"] for fault in options.faults]
    summary: dict[str, Any] = {
        name: sum(row[name] for row in rows) for name in ("requests", "wrong_answers", "failed_requests")
    }
    summary["recovery_ms_max"] = max(row["recovery_ms"] for row in rows)
    summary["recovered_in_time"] = summary["recovery_ms_max"] <= _ALLOWED_RECOVERY * 1e3
    result = report.write(options, "remote_faults", rows, summary)
    kept.forget()
    return result


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("remote_faults", __doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--seconds", type=report.positive, default=600.0, help="duration of each fault")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds = min(options.seconds, 5.0)
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
