"""Common parts of benchmarks: arguments, JSON, tables, statistics."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, Task
from rich.table import Table

from benchmarks.provenance import Provenance, RunStart

console = Console(width=None if os.environ.get("COLUMNS") or os.isatty(1) else 120)
_start = RunStart()
_VERSIONS = ("kvsidecar", "torch", "transformers", "grpcio", "lmdb", "numpy")


def parser(name: str, text: str) -> argparse.ArgumentParser:
    """Create a parser with the arguments that all benchmarks have; the provenance of the results begins here."""
    global _start
    _start = RunStart()
    out = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=text)
    out.add_argument("--quick", action="store_true", help="run the small size")
    out.add_argument("--out", type=result_file, help="write the results to this JSON file")
    return out


def result_file(text: str) -> Path:
    """Parse the path of a result file; a folder is refused before the benchmark runs, not after it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; it must be a file, as {path / 'result.json'}")
    return path


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``minimum`` on."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def exit_on_sigterm() -> None:
    """Handle SIGTERM like Ctrl-C, so that a benchmark stops its processes and removes its files."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignore further signals
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)


def progress() -> Progress:
    """Return a progress display: a bar on a terminal, and periodic lines elsewhere."""
    return Progress(console=console, transient=True) if console.is_terminal else _Lines(console=console, disable=True)


class _Lines(Progress):
    _EVERY_SECONDS = 30.0
    _said_at = 0.0

    def advance(self, task_id: Any, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(self._tasks[task_id])

    def update(self, task_id: Any, **fields: Any) -> None:
        super().update(task_id, **fields)
        self._say(self._tasks[task_id])

    def _say(self, task: Task) -> None:
        now = time.monotonic()
        self._said_at = self._said_at or now
        if now - self._said_at >= self._EVERY_SECONDS:
            self._said_at = now
            done = f"{task.completed:.0f} of {task.total or 0:.0f}"
            print(f"{task.description}: {done} after {task.elapsed or 0:.0f} s", flush=True)


def machine() -> dict[str, Any]:
    """Describe the machine: CPU, cores, memory, system, and GPU if there is one."""
    lines = _read("/proc/cpuinfo").splitlines()
    model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    memory = next((int(line.split()[1]) for line in _read("/proc/meminfo").splitlines() if "MemTotal" in line), 0)
    found: dict[str, Any] = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 20), 1),
        "system": platform.platform(),
    }
    from kvkernels.device.visible_devices import cuda_devices, device_of

    if cards := cuda_devices():
        found["gpu"] = device_of(cards[0]).facts.name
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def write(
    options: argparse.Namespace,
    name: str,
    rows: Sequence[dict[str, Any]],
    summary: dict[str, Any],
    shown: Sequence[str] = (),
) -> dict[str, Any]:
    """Print rows and summary, and with ``--out`` write them as JSON. ``shown`` limits the printed columns."""
    config = {k: v.name if isinstance(v, Path) else v for k, v in vars(options).items() if k != "out"}
    versions = {"python": platform.python_version(), **{v: importlib.metadata.version(v) for v in _VERSIONS}}
    result = {
        "benchmark": name,
        "provenance": Provenance.since(_start).as_dict(),
        "machine": machine(),
        "versions": versions,
        "config": config,
        "rows": list(rows),
        "summary": summary,
    }
    console.print(table([{k: r[k] for k in shown} for r in rows] if shown else rows))
    for key, value in summary.items():
        console.print(f"{key}: [bold]{_shown(value)}[/bold]")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(document(result), encoding="utf-8")
        console.print(f"[dim]written to {options.out}[/dim]")
    return result


def document(result: dict[str, Any]) -> str:
    """Return a result as JSON, with one row or one named value per line, so that diffs are short."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_by_lines(value)}" for key, value in result.items()) + "\n}\n"


def _by_lines(value: Any) -> str:
    if not value or not isinstance(value, list | dict):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Format rows as a table. Columns that contain dictionaries are left out."""
    out = Table()
    names = [
        k for k in dict.fromkeys(k for row in rows for k in row) if not any(isinstance(r.get(k), dict) for r in rows)
    ]
    for name in names:
        out.add_column(name, justify="right" if rows and isinstance(rows[0].get(name), (int, float)) else "left")
    for row in rows:
        out.add_row(*(_shown(row.get(n, "")) for n in names))
    return out


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def median(values: Sequence[float]) -> float:
    """Return the median, rounded to four decimals."""
    return round(statistics.median(values), 4)


def figure(values: Sequence[float], name: str = "median", prefix: str = "") -> dict[str, float | int]:
    """Return the fields ``name`` (median), ``[prefix_]spread``, and ``[prefix_]n`` (number of values)."""
    prefix = f"{prefix}_" if prefix else ""
    return {name: median(values), f"{prefix}spread": spread(values), f"{prefix}n": len(values)}


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile; 0 without values."""
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)] if values else 0.0


def spread(values: Sequence[float]) -> float:
    """Return half the interquartile range, relative to the median."""
    if len(values) < 4:
        return round((max(values) - min(values)) / 2 / statistics.median(values), 4)
    q = statistics.quantiles(values, n=4)
    return round((q[2] - q[0]) / 2 / statistics.median(values), 4)
