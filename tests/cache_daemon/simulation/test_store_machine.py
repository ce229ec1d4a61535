"""The store as a state machine: its promises hold in every order of events and faults.

Runs are simulated, see ``simulation``: what fails once fails again, and is shrunk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.eviction_policies import POLICIES
from tests.cache_daemon.simulation.machine import CATALOGUE, run
from tests.cache_daemon.simulation.plan import Step
from tests.cache_daemon.simulation.search import failure_of, outcome_of
from tests.cache_daemon.simulation.world import Settings, settings_of

# 20,000 steps, in pieces that can run beside each other. The nightly run has a million: see ``simulation``.
PIECES, SEEDS, STEPS = 8, 5, 500


@pytest.mark.parametrize("piece", range(PIECES))
def test_the_store_keeps_its_promises_whatever_happens(piece: int) -> None:
    for seed in range(piece * SEEDS, (piece + 1) * SEEDS):
        failure = failure_of(seed, STEPS, settings_of(seed))
        assert failure is None, f"{failure}\n  again: python -m tests.cache_daemon.simulation --first {seed} --seeds 1"


@given(
    plan=CATALOGUE.plans(30),
    policy=st.sampled_from(sorted(POLICIES)),
    daemons=st.integers(1, 2),
    durable=st.sampled_from([True, True, True, False]),
    device=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_short_plan_breaks_a_promise(
    plan: list[Step], policy: str, daemons: int, durable: bool, device: bool
) -> None:
    assert not outcome_of(plan, Settings(policy, daemons, durable, device)).error


@pytest.mark.parametrize("durable", [True, False])
def test_a_deletion_outlives_a_restart_if_there_is_a_disk(durable: bool) -> None:
    """Without a disk a deletion that the backend could not be told is lost with the daemon, also in an orderly end."""
    plan = [
        _step("save", at=0, n=0, salt=b"quota", many=((1,),), cut=1),
        _step("agree", at=0),
        _step("fail_network", at=1, count=0, away=True),
        _step("delete_tenant", at=1, salt=b"quota"),
        _step("restart", at=1, stay=False),
        _step("agree", at=0),
    ]
    log = run(plan, Settings(daemons=2, durable=durable), ends=False).log
    assert any("A DELETED" in line for line in log) == durable


def _step(name: str, **arguments: object) -> Step:
    return Step(name, tuple(arguments.items()), 0)


def test_a_seed_gives_the_same_log_again() -> None:
    plan = CATALOGUE.sample(7, 300)
    first, again = (outcome_of(plan, settings_of(7)) for _ in range(2))
    assert first.log == again.log
    assert len(first.log) > 500
    assert outcome_of(CATALOGUE.sample(8, 300), settings_of(7)).digest != first.digest


def test_a_seed_gives_the_same_log_in_another_process() -> None:
    code = (
        "from tests.cache_daemon.simulation.machine import CATALOGUE\n"
        "from tests.cache_daemon.simulation.search import outcome_of\n"
        "from tests.cache_daemon.simulation.world import settings_of\n"
        "print(outcome_of(CATALOGUE.sample(9, 200), settings_of(9)).digest)\n"
    )
    root = Path(__file__).parents[3]
    digests = set()
    for seed in ("1", "2"):  # sets of byte strings have another order in each
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert digests == {outcome_of(CATALOGUE.sample(9, 200), settings_of(9)).digest + "\n"}
