"""A hostile guest for a few seconds; ``python -m benchmarks.hostile`` runs for ten minutes."""

from __future__ import annotations

from benchmarks import hostile
from benchmarks.chaos.hostile_guest import ATTACKS


def test_a_hostile_guest_makes_no_call_of_a_worker_fail_and_takes_no_memory_beyond_the_budgets() -> None:
    found = hostile.measure(5.0, hostile=True)
    assert set(found["guest"]) == set(ATTACKS)
    assert all(counts.get("steps") for counts in found["guest"].values()), found["guest"]
    assert not any("INTERNAL" in counts or "UNKNOWN" in counts for counts in found["guest"].values())
    assert (found["wrong"], found["internal"], found["failed"]) == (0, 0, {})
    assert found["matches"] > 20
    assert found["above_budgets_mib"] < 200
