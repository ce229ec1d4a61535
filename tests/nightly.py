"""Runs the tests that ``make check`` leaves out: ``python -m tests.nightly [--out FOLDER] [--resume] [STEP …]``.

A step is a target of the Makefile or a command. If a step fails, the next ones still run. Random tests get a new seed,
which the JSON has for each step. The exit status is 1 if a step failed. With ``--resume``, steps that passed in an
earlier run of the same commit are not repeated, so a run of hours may be interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tests import seeds

ROOT = Path(__file__).parents[1]
_GRACE_SECONDS = 60.0
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|rerun)")


@dataclass(frozen=True)
class Step:
    """A command, and its time limit in hours."""

    name: str
    command: tuple[str, ...]
    hours: float


PYTEST = (sys.executable, "-m", "pytest", "-q")
STEPS = (
    Step("tests", ("make", "test", "TEST_FLAGS=--strict-skips"), 2),
    Step("long", (*PYTEST, "--run-long", "-m", "long"), 4),
    Step("machine", (sys.executable, "-m", "tests.cache_daemon.simulation", "--seeds", "200", "--steps", "5000"), 4),
    Step("mutants", ("make", "mutants"), 4),
    Step("azure", ("make", "test-azure"), 1),
    Step("vllm", ("make", "test-vllm"), 2),
    Step("vllm-own", ("make", "test-vllm-own"), 1),
    Step("sglang", ("make", "test-sglang"), 1),
    Step("lmcache", ("make", "test-lmcache"), 1),
    Step("peft", ("make", "test-peft"), 1),
    Step("smg", ("make", "test-smg"), 1),
    Step("frameworks", ("make", "test-frameworks"), 2),
    Step("vllm-http", ("make", "test-vllm-http"), 1),
    Step("autoawq", ("make", "test-autoawq"), 1),
    Step("lowest", ("make", "test-lowest"), 2),
)


@dataclass(frozen=True)
class StepResult:
    """Result of a step. ``code`` is None if the step reached its time limit; ``counts`` is pytest's last line."""

    name: str
    code: int | None
    seconds: float
    counts: str
    log: str
    seed: int

    @property
    def outcome(self) -> str:
        return "ok" if self.code == 0 else "out of time" if self.code is None else f"failed ({self.code})"


def run(step: Step, folder: Path) -> StepResult:
    """Run a step; write its output to a file in the folder."""
    log, began = folder / f"{step.name}.log", time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code: int | None = process.wait(step.hours * 3600)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    seconds = round(time.monotonic() - began, 1)
    return StepResult(step.name, code, seconds, counted(log.read_text()), str(log), seeds.chosen())


def counted(output: str) -> str:
    """Return the last line of each pytest run in the output, which has the counts."""
    found = [_COUNTS.findall(line) for line in output.splitlines() if re.search(r"\bin \d+(\.\d+)?s\b", line)]
    return "; ".join(", ".join(f"{number} {what}" for number, what in line) for line in found if line)


def table(results: Sequence[StepResult]) -> str:
    rows = [("step", "outcome", "minutes", "tests")]
    rows += [(r.name, r.outcome, f"{r.seconds / 60:.1f}", r.counts) for r in results]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ("  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def about() -> dict[str, object]:
    """Return the commit, the machine and the seed of this run."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1),
        "seed": seeds.chosen(),
    }


def passed_steps(path: Path, head: dict[str, object]) -> dict[str, StepResult]:
    """Return the steps that passed in the run that wrote ``path``, if both runs are of one commit without changes."""
    if not path.exists():
        return {}
    told = json.loads(path.read_text())
    if told["dirty"] or head["dirty"] or told["commit"] != head["commit"]:
        return {}
    names = [field.name for field in fields(StepResult)]
    found = [StepResult(**{name: step[name] for name in names}) for step in told["steps"]]
    return {result.name: result for result in found if result.code == 0}


def main(arguments: list[str], steps: Sequence[Step] = STEPS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(step.name for step in steps)}; all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "nightly", help="the folder for logs and results")
    parser.add_argument("--resume", action="store_true", help="keep the steps that passed on this commit before")
    given = parser.parse_args(arguments)
    names = {step.name for step in steps}
    if unknown := [name for name in given.steps if name not in names]:
        parser.error(f"there is no step {unknown[0]}; there are {', '.join(sorted(names))}")
    os.environ.setdefault(seeds.VARIABLE, "random")
    given.out.mkdir(parents=True, exist_ok=True)
    head = about()
    results = passed_steps(given.out / "nightly.json", head) if given.resume else {}
    print(f"seed {head['seed']} ({seeds.VARIABLE} repeats it)", flush=True)
    for step in steps:
        if step.name not in results and (not given.steps or step.name in given.steps):
            print(f"{step.name} …", flush=True)
            try:
                results[step.name] = run(step, given.out)
            except OSError as error:
                results[step.name] = StepResult(step.name, 127, 0.0, str(error), "", seeds.chosen())
            told = [asdict(one) | {"outcome": one.outcome} for one in results.values()]
            (given.out / "nightly.json").write_text(json.dumps(head | {"steps": told}, indent=1))
        if (result := results.get(step.name)) is not None:
            print(f"{step.name}: {result.outcome} after {result.seconds:.0f} s {result.counts}", flush=True)
    print(table(list(results.values())))
    return int(any(result.code != 0 for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
