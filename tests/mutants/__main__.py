"""Tries every declared mutation: ``python -m tests.mutants [-n PROCESSES] [--fresh] [WORD …]``.

A word is an area, a file, or the beginning of mutation names. The exit status is 1 if a mutation survives or is stale,
or if the tests notice a mutation that is declared equivalent.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tests.mutants.campaign import GOOD, Campaign, Result, Verdict
from tests.mutants.mutation import ROOT, StaleMutation, chosen, declared


def provenance() -> dict[str, object]:
    """Return the tested commit, whether files differ from it, and the time."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def table(results: Iterable[Result]) -> str:
    """Return a table of the verdicts by area, then each result that must not occur."""
    results = list(results)
    verdicts = [verdict for verdict in Verdict if any(result.verdict is verdict for result in results)]
    lines = [f"{'area':12}" + "".join(f"{verdict:>16}" for verdict in verdicts)]
    for area in [*sorted({result.area for result in results}), "all"]:
        counted = Counter(result.verdict for result in results if area in ("all", result.area))
        lines.append(f"{area:12}" + "".join(f"{counted[verdict]:>16}" for verdict in verdicts))
    lines += [f"{r.verdict.upper()}: {r.name} ({r.file}) {r.by}" for r in results if r.verdict not in GOOD]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="an area, a file, or how names begin")
    parser.add_argument("-n", "--processes", type=int, default=2, help="how many mutations at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json", help="where results go, as JSON")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run found on the same files")
    parser.add_argument("--tests", nargs="+", help="run these tests rather than those that each mutation names")
    parser.add_argument("--check", action="store_true", help="only say which mutations are stale")
    given = parser.parse_args(arguments)
    try:
        mutations = chosen(declared(), given.words)
    except StaleMutation as error:
        print(error)
        return 1
    if not mutations:
        print(f"no mutation is meant by {' '.join(given.words)}")
        return 1
    if given.check:
        stale = 0
        for mutation in mutations:
            try:
                mutation.mutated(ROOT)
            except StaleMutation as error:
                stale += 1
                print(error)
        print(f"{len(mutations)} mutations, {stale} stale")
        return int(stale > 0)
    if given.tests:
        mutations = [replace(mutation, tests=tuple(given.tests)) for mutation in mutations]
    campaign = Campaign(given.out, given.processes, resume=not given.fresh, tell=lambda line: print(line, flush=True))
    results = campaign.run(mutations, provenance())
    print(table(results))
    return int(any(result.verdict not in GOOD for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
