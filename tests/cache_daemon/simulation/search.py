"""Search over seeds: failures, their replay, and the shortest plan that fails alike."""

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
    """Result of a plan: the steps taken, the log's digest, and the defect if there was one."""

    steps: int
    digest: str
    log: list[str]
    error: str = ""


def outcome_of(plan: Sequence[Step], settings: Settings) -> Outcome:
    """Run a plan. An unexpected exception is a defect, as a broken promise is."""
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
    """A failing seed, and a short plan that fails as well."""

    seed: int
    steps: int
    error: str
    plan: list[Step]

    def __str__(self) -> str:
        steps = "\n".join(f"    {one}" for one in self.plan)
        return f"seed {self.seed} failed after {self.steps} steps: {self.error}\n  {len(self.plan)} steps do:\n{steps}"


def failure_of(seed: int, steps: int, settings: Settings, shrinks: bool = True) -> Failure | None:
    """Run the plan of a seed; None when it succeeds."""
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
    """Reduce an error to its words, without tokens and numbers, to compare it while its plan is shrunk."""
    return "".join(c for c in error if not (c.isdigit() or c in "()[], ABe+-."))
