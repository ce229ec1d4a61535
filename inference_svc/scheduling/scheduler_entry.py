"""What the scheduler, which knows no sequences, needs to know of one."""

from __future__ import annotations

from inference_svc.engine.sequence import Sequence
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.scheduling.scheduler import SchedulerEntry


def work_of(sequence: Sequence, pool: KVPool, guesses: int, most: int | None = None) -> SchedulerEntry:
    """What a sequence with pages asks of the next forward: its missing tokens, ``most`` of them if need be, and so many
    guesses to verify."""
    assert sequence.table is not None
    return SchedulerEntry(
        arrived=sequence.arrived,
        missing=sequence.missing if most is None else min(sequence.missing, most),
        room=sequence.table.tokens - sequence.computed,
        pages=pool.own_pages(sequence.table),
        passed_over=sequence.passed_over,
        gated=sequence.gated,
        guesses=guesses,
        apart=sequence.table.apart,
    )
