"""A hostile guest for a few seconds; ``python -m benchmarks.hostile`` runs for ten minutes."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import hostile
from benchmarks.chaos import hostile_guest
from benchmarks.chaos.hostile_guest import ATTACKS
from benchmarks.node import Node


def test_a_hostile_guest_makes_no_call_of_a_worker_fail_and_takes_no_memory_beyond_the_budgets() -> None:
    found = hostile.measure(5.0, hostile=True)
    assert set(found["guest"]) == set(ATTACKS)
    assert all(counts.get("steps") for counts in found["guest"].values()), found["guest"]
    assert not any("INTERNAL" in counts or "UNKNOWN" in counts for counts in found["guest"].values())
    assert (found["wrong"], found["internal"], found["failed"]) == (0, 0, {})
    assert found["matches"] > 20
    assert found["above_budgets_mib"] < 200


def test_failed_calls_are_counted_in_the_whole_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "_whole_log", lambda _: 3 * "a call failed\n" + "x" * 10_000)
    assert hostile.measure(0.1, hostile=False)["internal"] == 3


@pytest.fixture
def quick_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_guest, "ATTACKS", {"quick": lambda guest: itertools.repeat(None)})


@pytest.mark.usefixtures("quick_attack")
def test_each_attack_takes_a_step_even_if_the_attack_is_stopped_at_once(tmp_path: Path) -> None:
    over = threading.Event()
    over.set()
    assert hostile_guest.run(tmp_path / "s", over) == {"quick": {"steps": 1}}


@pytest.mark.usefixtures("quick_attack")
def test_the_attack_goes_on_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest of ten minutes ended after 280 s: it waited 40 s for each attack."""
    monkeypatch.setattr(hostile_guest, "_END_SECONDS", 0.1)
    over = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        attack = threads.submit(hostile_guest.run, tmp_path / "s", over)
        try:
            with pytest.raises(TimeoutError):
                attack.result(1)
        finally:
            over.set()
        assert set(attack.result(60)) == {"quick"}
