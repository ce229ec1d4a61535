"""Two vLLM engines on one daemon under load, while engines and daemon repeatedly get SIGKILL.

wrong_answers    answers that differ from those of vLLM without a connector
hung_requests    requests to a live engine without an answer in time
failed_requests  requests with an error from a live engine, or in an engine that died by itself
interrupted      requests in an engine when the benchmark killed it
leaked           leases and reservations that remain after the load

vLLM's own cache is too small for the prompts, so the engines load from the daemon all the time.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engines import TokenSource, together
from benchmarks.node import Node
from benchmarks.systems.checkpoint import folder_of
from benchmarks.systems.engine import Engine, EngineDied, RequestFailed
from benchmarks.systems.environments import EngineNotInstalled
from benchmarks.systems.vllm_engines import EngineSettings, environment

FAULTS = ("kill_engine_0", "kill_engine_1", "kill_daemon", "kill_daemon_and_supervisor")
_CONTEXT, _ANSWER_TOKENS, _BLOCK = 512, 12, 32
_SHARED, _OWN = 160, 160
_SETTLED_SECONDS, _DOWN_SECONDS = 30.0, 0.2


class Load:
    """Clients, one thread each. A client sends each request to a random live engine."""

    def __init__(
        self, engines: list[Engine], expected: dict[int, list[int]], prompts: list[list[int]], hang_seconds: float
    ) -> None:
        self._engines, self._expected, self._prompts, self._hang_seconds = engines, expected, prompts, hang_seconds
        self._over, self._lock = threading.Event(), threading.Lock()
        self.down: set[Engine] = set()  # engines that the benchmark has killed
        self.counts: Counter[str] = Counter()
        self.reasons: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, clients: int, seed: int) -> None:
        for i in range(clients):
            self._threads.append(threading.Thread(target=self._run, args=(random.Random(f"{seed}:{i}"),)))
            self._threads[-1].start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, draw: random.Random) -> None:
        while not self._over.is_set():
            up = [engine for engine in self._engines if engine.alive]
            if not up:
                self._over.wait(_DOWN_SECONDS)
                continue
            engine, n = draw.choice(up), draw.choice(list(self._expected))
            try:
                found = engine.ask(self._prompts[n], _ANSWER_TOKENS, seconds=self._hang_seconds)
                self._count("answered" if found.ids == self._expected[n] else "wrong_answers")
                self._count("reused_tokens", found.cached)
            except EngineDied as error:
                if engine in self.down:
                    self._count("interrupted")
                else:
                    self._count("failed_requests", why=str(error))
            except RequestFailed as error:
                self._count("failed_requests", why=str(error))
            except TimeoutError:
                self._count("hung_requests", why=f"no answer in {self._hang_seconds:g} s")

    def _count(self, what: str, by: int = 1, why: str = "") -> None:
        with self._lock:
            self.counts[what] += by
            if why:
                self.reasons.append(why)


class FaultScenario:
    """Two engines, their daemon, and the expected answers."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsidecar-faults-")))
        recipe = EngineSettings(
            environment(), scratch, folder_of(options.model, scratch), "float32", _CONTEXT, options.kv_bytes, eager=True
        )
        draw = TokenSource(options.seed)
        shared = draw(_SHARED)
        self.prompts = [shared + draw(_OWN + i) for i in range(options.prompts)]
        with recipe.plain(prefix_caching=False, block_size=_BLOCK) as plain:
            alone = [plain.ask(prompt, _ANSWER_TOKENS).ids for prompt in self.prompts]
            batched = together(plain, self.prompts, _ANSWER_TOKENS)
        # If two tokens are almost equally likely, vLLM itself may answer differently in another batch. Such prompts are
        # left out.
        self.expected = {n: a for n, (a, b) in enumerate(zip(alone, batched, strict=True)) if a == b}
        flags = {"heartbeat_ms": 2000}
        self.node = stack.enter_context(Node(workers=0, arena_bytes="256MiB", daemon_flags=flags))
        self.engines = [
            stack.enter_context(recipe.connected(self.node.cache_socket, block_size=_BLOCK)) for _ in range(2)
        ]

    def happen(self, fault: str, load: Load) -> None:
        """Inject one fault; return when the killed processes are up again."""
        if fault == "kill_daemon":
            self.node.crash_daemon()
            self.node.wait_daemon()
        elif fault == "kill_daemon_and_supervisor":
            self.node.kill("daemon")
            self.node.start_daemon()
        else:
            engine = self.engines[int(fault[-1])]
            load.down.add(engine)
            engine.restart()
            load.down.remove(engine)

    def leaked(self, load: Load) -> int:
        """Return the number of leases and reservations that remain after the last request."""
        deadline = time.monotonic() + _SETTLED_SECONDS
        while True:
            stats = self.node.cache_stats()
            over = int(stats.leases + stats.reservations)
            if not over:
                return 0
            if time.monotonic() > deadline:
                load.reasons.append(f"{stats.leases} leases and {stats.reservations} reservations are left")
                return over
            time.sleep(0.1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    draw, done = random.Random(options.seed), Counter[str]()
    with ExitStack() as stack, report.progress() as progress:
        task = progress.add_task("starting vLLM", total=options.seconds)
        try:
            scene = FaultScenario(options, stack)
        except EngineNotInstalled as why:
            report.console.print(f"[yellow]{why}[/yellow]")
            return report.write(options, "engine_faults", [], {"missing": str(why)})
        load = Load(scene.engines, scene.expected, scene.prompts, options.hang_seconds)
        load.start(options.clients, options.seed)
        began = time.monotonic()
        progress.update(task, description="killing")
        try:
            _kill(scene, load, options, draw, done, lambda: progress.update(task, completed=time.monotonic() - began))
        finally:
            load.stop()
        leaked = scene.leaked(load)
    rows = [{"fault": fault, "rounds": done[fault]} for fault in FAULTS]
    names = ("wrong_answers", "hung_requests", "failed_requests", "interrupted", "answered", "reused_tokens")
    summary: dict[str, Any] = {name: load.counts[name] for name in names}
    summary |= {"leaked": leaked, "prompts_vllm_is_sure_of": len(scene.expected), "seconds": options.seconds}
    return report.write(options, "engine_faults", rows, summary | {"reasons": sorted(set(load.reasons))[:5]})


def _kill(
    scene: FaultScenario,
    load: Load,
    options: argparse.Namespace,
    draw: random.Random,
    done: Counter[str],
    step: Callable[[], None],
) -> None:
    """Inject faults until the time is over, each kind at least once."""
    until, left = time.monotonic() + options.seconds, list(FAULTS)
    draw.shuffle(left)
    while time.monotonic() < until or left:
        time.sleep(draw.uniform(0.5, options.every))
        fault = left.pop() if left else draw.choice(FAULTS)
        scene.happen(fault, load)
        done[fault] += 1
        step()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("engine_faults", __doc__ or "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=report.positive, default=600.0)
    parser.add_argument("--every", type=report.positive, default=6.0, help="maximum seconds between two faults")
    parser.add_argument("--clients", type=report.at_least(1), default=6)
    parser.add_argument("--prompts", type=report.at_least(1), default=48)
    parser.add_argument("--kv-bytes", type=int, default=16 << 20, help="vLLM's own KV cache, per engine")
    parser.add_argument(
        "--hang-seconds",
        "--patience",
        type=report.positive,
        default=60.0,
        help="seconds after which a request counts as hung",
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.prompts, options.clients = 30.0, 16, 4
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
