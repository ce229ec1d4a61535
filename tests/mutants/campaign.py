"""Parallel run of many mutations, which reuses the results of earlier runs."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from tests.mutants.mutation import ROOT, Mutation, StaleMutation
from tests.mutants.sandbox import Outcome, Sandbox

# Exit codes of pytest that notice a defect: 1 means that tests failed, 2 that a test file could not be imported.
_FAILED = 1
_INTERRUPTED = 2


class Verdict(StrEnum):
    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    EQUIVALENT = "equivalent"
    NOT_EQUIVALENT = "not equivalent"
    STALE = "stale"
    UNSOUND = "tests fail without it"
    ERROR = "error"


# Verdicts of a successful campaign.
GOOD = {Verdict.KILLED, Verdict.TIMED_OUT, Verdict.EQUIVALENT}


@dataclass(frozen=True)
class Result:
    """Result of one mutation. ``by`` names the test that noticed it, or the reason why there is no verdict."""

    area: str
    name: str
    file: str
    verdict: Verdict
    seconds: float
    by: str
    digest: str


class Campaign:
    """Tries mutations in ``processes`` copies of the tree. Each result is written to ``out`` at once."""

    def __init__(
        self,
        out: Path,
        processes: int,
        resume: bool,
        tell: Callable[[str], None] = print,
        sandbox: Callable[[], Sandbox] = lambda: Sandbox(ROOT),
    ) -> None:
        self._out, self._processes, self._tell, self._sandbox = out, processes, tell, sandbox
        self._known = {}
        if resume and out.exists():
            for entry in json.loads(out.read_text())["results"]:
                result = Result(**entry | {"verdict": Verdict(entry["verdict"])})
                if result.verdict in GOOD:
                    self._known[result.name] = result
        self._results: dict[str, Result] = {}
        self._baselines: dict[tuple[str, ...], Outcome] = {}
        self._lock = threading.Lock()
        self._baseline_locks: dict[tuple[str, ...], threading.Lock] = {}

    def run(self, mutations: Iterable[Mutation], about: dict[str, object]) -> list[Result]:
        mutations = list(mutations)
        with ExitStack() as stack:
            sandboxes: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
            for _ in range(self._processes):
                sandboxes.put(stack.enter_context(self._sandbox()))

            def work(mutation: Mutation) -> None:
                sandbox = sandboxes.get()
                try:
                    result = self._result_of(mutation, sandbox)
                finally:
                    sandboxes.put(sandbox)
                with self._lock:
                    self._results[mutation.name] = result
                    self._save(about)
                    done = f"{len(self._results)}/{len(mutations)}"
                    self._tell(f"{done} {result.verdict:>9} {result.seconds:5.0f} s  {result.name}  {result.by}")

            with ThreadPoolExecutor(self._processes) as pool:
                try:
                    for future in [pool.submit(work, mutation) for mutation in mutations]:
                        future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)  # the running mutations finish
                    raise
        return [self._results[mutation.name] for mutation in mutations]

    def _save(self, about: dict[str, object]) -> None:
        results = [asdict(result) for result in self._results.values()]
        # Keep the earlier results, in case this run is interrupted.
        results += [asdict(result) for name, result in self._known.items() if name not in self._results]
        self._out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._out.with_suffix(".part")
        unfinished.write_text(json.dumps(about | {"results": results}, indent=1))
        unfinished.replace(self._out)

    def _result_of(self, mutation: Mutation, sandbox: Sandbox) -> Result:
        def result(verdict: Verdict, seconds: float = 0.0, by: str = "") -> Result:
            return Result(mutation.area, mutation.name, mutation.file, verdict, round(seconds, 1), by, digest)

        digest = ""
        try:
            mutation.mutated(sandbox.tree)
        except StaleMutation as error:
            return result(Verdict.STALE, by=str(error))
        digest = mutation.digest(sandbox.tree)
        known = self._known.get(mutation.name)
        if known is not None and known.digest == digest:
            return known
        baseline = self._baseline(mutation.tests, sandbox)
        if baseline.code != 0:
            return result(Verdict.UNSOUND, baseline.seconds, baseline.failed or baseline.output[-500:])
        found = sandbox.try_mutation(mutation, limit_seconds=120 + 5 * baseline.seconds)
        if found.code is None:
            verdict = Verdict.NOT_EQUIVALENT if mutation.equivalent else Verdict.TIMED_OUT
            return result(verdict, found.seconds)
        if found.code == 0:
            verdict = Verdict.EQUIVALENT if mutation.equivalent else Verdict.SURVIVED
            return result(verdict, found.seconds, mutation.equivalent)
        if found.code in (_FAILED, _INTERRUPTED):
            verdict = Verdict.NOT_EQUIVALENT if mutation.equivalent else Verdict.KILLED
            return result(verdict, found.seconds, found.failed)
        if found.code < 0:  # the defect crashed pytest
            return result(Verdict.KILLED, found.seconds, f"pytest died of signal {-found.code}")
        return result(Verdict.ERROR, found.seconds, found.output[-500:])

    def _baseline(self, tests: tuple[str, ...], sandbox: Sandbox) -> Outcome:
        """Return the outcome of the tests without a defect, because a test that always fails notices nothing."""
        with self._lock:
            lock = self._baseline_locks.setdefault(tests, threading.Lock())
        with lock:
            if tests not in self._baselines:
                self._baselines[tests] = sandbox.run(tests, limit_seconds=900)
            return self._baselines[tests]
