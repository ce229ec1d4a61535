"""Order of memory accesses, by vector clocks over streams, events and the host.

All host threads count as one actor, because locks order them and no vector clock sees locks. An access is checked when
it is enqueued, so a missing order is found whatever the timing of the work.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.kvkernels.device.device_fault import UnorderedAccess

HOST = "the host"
Clock = dict[str, int]
_OWN_FOLDERS = (str(Path(__file__).parent) + "/", "/kvkernels/device/", "/torch/", "/contextlib.py")


@dataclass(frozen=True)
class Access:
    """An access to the bytes ``start`` to ``end`` of a block, at a time of an actor's clock.

    A ``scattered`` access uses only some rows in this range, which only the kernel knows. Two scattered accesses do not
    conflict.
    """

    start: int
    end: int
    writes: bool
    actor: str
    time: int
    what: str
    scattered: bool = False

    def __str__(self) -> str:
        return f"{'writes' if self.writes else 'reads'} in {self.what} on {self.actor}"


class AccessOrder:
    """Vector clocks of all actors, and for each block the accesses with which a later access may conflict."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        self._accesses: defaultdict[int, list[Access]] = defaultdict(list)
        self.num_checked = 0

    def clock_of(self, actor: str) -> Clock:
        return dict(self._clocks[actor])

    def join(self, actor: str, clock: Clock) -> None:
        """Order an actor's later accesses after all work that a clock has seen."""
        mine = self._clocks[actor]
        for other, time in clock.items():
            mine[other] = max(mine.get(other, 0), time)

    def advance(self, actor: str) -> None:
        """Begin an actor's next piece of work."""
        self._clocks[actor][actor] = self._clocks[actor].get(actor, 0) + 1

    def add(
        self, block: int, start: int, end: int, writes: bool, actor: str, what: str, scattered: bool = False
    ) -> None:
        """Add an access of an actor now. Raises UnorderedAccess, which names both places in the code."""
        mine = self._clocks[actor]
        new = Access(start, end, writes, actor, mine.get(actor, 0), what, scattered)
        self.num_checked += 1
        kept = []
        for old in self._accesses[block]:
            overlaps = old.start < end and start < old.end and not (scattered and old.scattered)
            if overlaps and (old.writes or writes) and mine.get(old.actor, 0) < old.time:
                at, until = max(start, old.start), min(end, old.end)
                raise UnorderedAccess(f"bytes {at} to {until}: {new}; not ordered after: {old}")
            covered = start <= old.start and old.end <= end and not scattered
            if not (covered and (writes or (old.actor == actor and not old.writes))):
                kept.append(old)
        self._accesses[block] = [*kept, new]

    def last_unordered(self, block: int, actor: str) -> Access | None:
        """Return an access of a block that is not ordered before the actor's current work."""
        mine = self._clocks[actor]
        return next((a for a in self._accesses[block] if mine.get(a.actor, 0) < a.time), None)

    def forget(self, block: int) -> None:
        self._accesses.pop(block, None)


def call_site() -> str:
    """Return the file and line that called the device."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if Path(name).name.startswith("test_") or not any(own in name for own in _OWN_FOLDERS):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
