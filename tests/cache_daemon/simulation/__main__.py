"""The nightly run: ``python -m tests.cache_daemon.simulation --seeds 200 --steps 5000``.

The command prints its progress, then the numbers of seeds, steps and failures. For each failing seed, it prints the
shortest plan that fails in the same way. The exit status is 1 if a seed failed. ``--first N --seeds 1`` replays one
seed; with ``--log``, it also prints the log.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields, replace

from tests.cache_daemon.simulation.machine import CATALOGUE
from tests.cache_daemon.simulation.search import failure_of, outcome_of
from tests.cache_daemon.simulation.world import Promises, settings_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cache_daemon.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds are run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5000, help="steps of each seed (default: %(default)s)")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for shorter plans that fail alike")
    parser.add_argument("--log", action="store_true", help="print all that happened to each seed")
    names = [one.name for one in fields(Promises)]
    parser.add_argument(
        "--promise", action="append", choices=names, default=[], help="ask for what a known defect may break, too"
    )
    given = parser.parse_args()
    promises = replace(Promises(), **dict.fromkeys(given.promise, True))
    failed, steps, began, cpu = [], 0, time.monotonic(), time.process_time()
    for n, seed in enumerate(range(given.first, given.first + given.seeds), 1):
        settings = settings_of(seed, promises)
        found = outcome_of(CATALOGUE.sample(seed, given.steps), settings)
        steps += found.steps
        if given.log:
            print("\n".join(found.log))
        if found.error:
            failed.append(seed)
            print(f"seed {seed} ({settings}) failed after {found.steps} steps: {found.error}", flush=True)
            if not given.no_shrink:
                print(failure_of(seed, given.steps, settings), flush=True)
            print(
                f"  again: python -m tests.cache_daemon.simulation --first {seed} --seeds 1 --steps {given.steps} --log"
            )
        if n % 10 == 0 or n == given.seeds:
            passed = time.monotonic() - began
            print(f"{n} of {given.seeds} seeds, {steps} steps, {len(failed)} failed, {passed:.0f} s", flush=True)
    spent = time.process_time() - cpu
    print(f"{given.seeds} seeds, {steps} steps, {len(failed)} failed {failed or ''}, {spent:.0f} s of CPU", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
