"""Defects planted in the store: the state machine finds each, and shrinks it to a few steps."""

from __future__ import annotations

import inspect
import sys
import textwrap

import pytest

from cache_daemon.store.gpu_tier import GpuTier
from cache_daemon.store.lookup import Lookup
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.two_phase_commit import TwoPhaseCommit
from tests.cache_daemon.simulation.search import failure_of
from tests.cache_daemon.simulation.world import settings_of

SEEDS, STEPS = 40, 500
PLANTED = {
    "a Match leases for a session that has ended": (
        Lookup, "_match", "if session.closed:", "if False:", "has ended was answered", 8,
    ),
    "a pin does not keep a chunk in the durable tier": (
        TierManager, "update_evictable", "chunk, chunk.is_spared or (needed", "chunk, (needed", "is pinned, and", 12,
    ),
    "a Commit checks what the worker wrote, not its own copy": (
        TwoPhaseCommit, "_copy_and_verify", "keys.checksum(arena.read(copy.slot))", "keys.checksum(view)",
        "shows other bytes", 6,
    ),
    "a Match that is cancelled keeps its chunks": (
        Lookup, "_match", "            lease.release()\n            raise\n", "            raise\n", "", 12,
    ),
    "a copy in GPU memory is told of before it is complete": (
        GpuTier, "_next_batch", "gpu_state = slot, Residency.IN_FLIGHT", "gpu_state = slot, Residency.PRESENT",
        "a copy in the GPU arena has other bytes", 12,
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_found_and_shrunk(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, sound, broken, told, most_steps = PLANTED[defect]
    source = f"class _:\n{textwrap.indent(textwrap.dedent(inspect.getsource(getattr(owner, method))), '    ')}"
    assert source.count(sound) == 1, f"{owner.__name__}.{method} is another one now: plant the defect anew"
    made: dict[str, type] = {}
    exec(source.replace(sound, broken), vars(sys.modules[owner.__module__]), made)
    monkeypatch.setattr(owner, method, vars(made["_"])[method])

    failure = next((f for seed in range(SEEDS) if (f := failure_of(seed, STEPS, settings_of(seed)))), None)

    assert failure is not None, f"not found in {SEEDS * STEPS} steps"
    assert told in failure.error, failure
    assert len(failure.plan) <= most_steps, failure
