"""Checkpointed results of an interrupted run, from which the next run resumes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.provenance import SourceState

Job = tuple[str, int]  # task, and index of the prompt


class CheckpointedResults:
    """File of JSON lines. The first line identifies the run; each further one is ``[job, {arm: fields}]`` of a prompt.

    Without a path, the class stores nothing.
    """

    def __init__(self, path: Path | None, options: argparse.Namespace) -> None:
        self._path = path
        # These options do not change a prompt's results, so a run with other values reuses the file.
        ignored = ("out", "processes", "threads", "quick", "n", "n_exact")
        settings = {k: v for k, v in sorted(vars(options).items()) if k not in ignored}
        self._run = {**settings, "source": asdict(SourceState.now()), "cpu": report.machine()["cpu"]}

    def read(self) -> Iterator[tuple[Job, dict[str, dict[str, Any]]]]:
        """Yield the stored results; none if they are of other settings, another commit or another CPU."""
        if self._path is None or not self._path.exists():
            return
        with self._path.open(encoding="utf-8") as file:
            if json.loads(file.readline() or "null") != self._run:
                why = "is of other settings, another commit or another CPU, and is rewritten"
                report.console.print(f"[dim]{self._path} {why}[/dim]")
                return
            for line in file:
                if not line.endswith("\n"):  # the run ended in the middle of this line
                    return
                (name, number), arms = json.loads(line)
                yield (name, number), arms

    def write(self, found: list[tuple[Job, dict[str, dict[str, Any]]]]) -> None:
        """Write the file anew, because it may end in half a line."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._run) + "\n", encoding="utf-8")
            for job, arms in found:
                self.add(job, arms)

    def add(self, job: Job, arms: dict[str, dict[str, Any]]) -> None:
        """Append one result."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([job, arms]) + "\n")

    def forget(self) -> None:
        """Delete the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
