"""Search over seeds for failures; replays a failure, and finds the shortest plan that fails in the same way."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cache_daemon.simulation.machine import CATALOGUE, Machine
from tests.cache_daemon.simulation.plan import Step, shrunk
from tests.cache_daemon.simulation.world import Settings, World


@dataclass(frozen=True)
class Outcome:
    """Result of a plan: the number of steps, the digest of the log, and the defect if there was one."""

    steps: int
    digest: str
    log: list[str]
    error: str = ""


def outcome_of(plan: Sequence[Step], settings: Settings) -> Outcome:
    """Run a plan. A broken promise and an unexpected exception are both defects."""
    world, steps, error = World(settings), 0, ""
    try:
        with world.running():
            machine = Machine(world)
            for one in plan:
                machine.take(one)
                steps += 1
            machine.end()
    except Exception as failure:
        last = traceback.extract_tb(failure.__traceback__)[-1]
        error = f"{type(failure).__name__}: {failure} ({Path(last.filename).name}, {last.name})"
    return Outcome(steps, world.digest, world.log, error)


@dataclass(frozen=True)
class Failure:
    """A failing seed, and a short plan that fails in the same way."""

    seed: int
    steps: int
    error: str
    plan: list[Step]

    def __str__(self) -> str:
        steps = "\n".join(f"    {one}" for one in self.plan)
        return f"seed {self.seed} failed after {self.steps} steps: {self.error}\n  {len(self.plan)} steps do:\n{steps}"


def failure_of(seed: int, steps: int, settings: Settings, shrinks: bool = True) -> Failure | None:
    """Run the plan of a seed; return the failure, or None if the plan succeeds."""
    plan = CATALOGUE.sample(seed, steps)
    found = outcome_of(plan, settings)
    if not found.error:
        return None
    shorter = list(plan[: found.steps + 1])
    if shrinks:
        kind = _kind(found.error)
        shorter = shrunk(shorter, lambda some: _kind(outcome_of(some, settings).error) == kind)
    return Failure(seed, found.steps, found.error, shorter)


def _kind(error: str) -> str:
    """Reduce an error to its words without tokens and numbers, so that errors of shrunk plans can be compared."""
    return "".join(c for c in error if not (c.isdigit() or c in "()[], ABe+-."))
