"""Runs steps as child processes with a time limit, and writes all results after each step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from benchmarks import report
from benchmarks.first_contact.row import Row, RowFile
from benchmarks.provenance import Provenance, RunStart

_LAST_WORDS_SECONDS = 10.0
_COLUMNS = ("case", "verdict", "value", "reference", "speedup")


@dataclass(frozen=True)
class Step:
    """A step's name and its time limit. ``step_child`` maps the name to a function."""

    name: str
    limit_seconds: float


class StepRunner:
    """Runs steps in order. If a step fails, hangs or crashes, it gets a failed row, and the next step runs."""

    def __init__(self, arguments: Sequence[str], out: Path, seconds: float) -> None:
        """Create the runner. Every step gets ``arguments``; ``seconds`` is the time limit of all steps together.

        The output of all steps, with the tracebacks of failed rows, goes to a file beside ``out``.
        """
        self._arguments, self._out = arguments, out
        self.log = out.with_suffix(".log")
        self.log.unlink(missing_ok=True)
        self._deadline, self._lock = time.monotonic() + seconds, threading.Lock()
        self.rows: list[dict[str, Any]] = []
        self._seconds: dict[str, float] = {}
        self._machine, self._start = report.machine(), RunStart()

    def run(self, *steps: Step) -> None:
        """Run steps at the same time; after each of them, write the results of all steps so far."""
        with ThreadPoolExecutor(len(steps)) as threads:
            list(threads.map(self._run, steps))

    def _run(self, step: Step) -> None:
        began = time.monotonic()
        limit = min(step.limit_seconds, self._deadline - began)
        if limit < 1:
            rows = [Row("", False, "not run: the steps before took all the time")]
        else:
            report.console.print(f"[dim]{step.name} (at most {limit:.0f} s)[/dim]")
            rows = self._rows_of(step, limit)
        with self._lock:
            self._add(step, rows)
            self._seconds[step.name] = round(time.monotonic() - began, 1)
            self._write()

    @property
    def failures(self) -> int:
        return sum(row["verdict"] == "FAILED" for row in self.rows)

    def print_table(self) -> None:
        for step, seconds in self._seconds.items():
            mine = [row for row in self.rows if row["step"] == step]
            report.console.rule(f"{step}, {seconds:.0f} s", align="left")
            for fake in dict.fromkeys(row["fake"] for row in mine if row["fake"]):
                report.console.print(f"[dim]{fake}[/dim]")
            report.console.print(report.table([{k: _cell(row[k]) for k in _COLUMNS} for row in mine]))
        took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self._seconds.items())
        report.console.print(f"{len(self.rows)} rows, {self.failures} failed; {took}; {self._out}, {self.log}")

    def _rows_of(self, step: Step, limit: float) -> list[Row]:
        with tempfile.TemporaryDirectory(prefix="kvsidecar-step-") as folder:
            rows, log = RowFile(Path(folder) / "rows.jsonl"), Path(folder) / "log"
            command = [sys.executable, "-m", "benchmarks.first_contact.step_child", step.name, *self._arguments]
            with log.open("wb") as output:
                # Each step has its own session, so that the runner can also end the processes that it leaves behind.
                child = subprocess.Popen(
                    [*command, "--rows", str(Path(folder) / "rows.jsonl")],
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                with _ended(child):
                    try:
                        code: int | None = child.wait(limit)
                    except subprocess.TimeoutExpired:
                        code = None
                        child.terminate()  # it prints where its processes are
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            child.wait(_LAST_WORDS_SECONDS)
            found, said = rows.read(), _last_line(log)
            self._keep(step, log)
            if code is None:
                found.append(Row("", False, f"ended after {limit:.0f} s, its limit; last output: {said}"))
            elif code:
                found.append(Row("", False, f"ended with {_name_of(code)}: {said}"))
            elif not found:
                found.append(Row("", False, "it gave no rows"))
            return found

    def _keep(self, step: Step, log: Path) -> None:
        with self._lock:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as file:
                file.write(f"==== {step.name} ====\n".encode() + log.read_bytes())

    def _add(self, step: Step, rows: list[Row]) -> None:
        verdicts = {None: "measured", True: "passed", False: "FAILED"}
        for row in rows:
            values = asdict(row)
            verdict = verdicts[values.pop("passed")]
            self.rows.append({"step": step.name, "verdict": verdict, **values})

    def _write(self) -> None:
        """Replace the file in one operation, so that it is complete at any time."""
        result = {
            "benchmark": "first_contact",
            "provenance": Provenance.since(self._start).as_dict(),
            "machine": self._machine,
            "summary": {"failed": self.failures, "seconds": self._seconds},
            "rows": self.rows,
        }
        self._out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._out.with_suffix(".part")
        unfinished.write_text(report.document(result), encoding="utf-8")
        unfinished.replace(self._out)


@contextlib.contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """At the end of the ``with`` block, kill a child and all processes of its session."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return escape(value)
    return "" if value is None else value


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "none"


def _name_of(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
