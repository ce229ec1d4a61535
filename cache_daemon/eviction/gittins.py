"""Gittins policy, the default: evicts the lowest expected savings first.

It ranks entries by their Gittins index: the expected prefill time that an entry saves per byte and unit of time in the
tier, learnt from observed reuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from sortedcontainers import SortedDict

from cache_daemon.eviction.eviction_policy import Entry
from cache_daemon.eviction.ghost_list import GhostList
from cache_daemon.eviction.prefill_cost import PrefillCost
from cache_daemon.eviction.reuse_stats import AGES, ReuseStats

# After its last use, an entry is observed in the tier or as a ghost. The observation lasts at least this factor times
# the tier's number of entries, in ticks, unless the ghost list (8 bytes per ghost) overflows.
_HISTORY_FACTOR = 8
_MAX_GHOSTS = 1 << 20
_SLICES_PER_FIT = 8
# Lower bound of the length of a time slice, which otherwise would be a few ticks in a small tier.
_MIN_SLICE_TICKS = 64
# Counts above these are treated as equal to them.
_MAX_SEGMENTS, _MAX_USES = 4, 63
_SEGMENT_KINDS, _USE_KINDS = _MAX_SEGMENTS + 1, _MAX_USES.bit_length() + 1
_BUCKETS_PER_OCTAVE = 2
# Slice number of all entries of the last age.
_OLDEST = -1
_Rank = tuple[float, int, int, int]


@dataclass(slots=True)
class _History:
    """Reuse history of an entry: the features that determine its kind.

    ``reused_segments`` counts the chunks before the entry in its prompt that were reused. ``inner`` says that the
    entry has a child. ``kind`` encodes these two and ``uses`` in one number.
    """

    reused_segments: int
    uses: int
    inner: bool
    kind: int = field(init=False)

    def __post_init__(self) -> None:
        self.kind = (self.inner * _SEGMENT_KINDS + self.reused_segments) * _USE_KINDS + self.uses.bit_length()

    def use(self, uses: int = 0) -> None:
        """Count one more use; the result is at least ``uses``."""
        if self.uses < _MAX_USES:
            self.uses = min(max(self.uses + 1, uses), _MAX_USES)
            self.__post_init__()

    def correct(self, inner: bool) -> None:
        self.inner = inner
        self.__post_init__()

    @property
    def note(self) -> int:
        return (self.inner << 3 | self.reused_segments) << 6 | self.uses

    @classmethod
    def of_note(cls, note: int) -> _History:
        return cls(note >> 6 & 7, note & 63, bool(note >> 9))


@dataclass(eq=False, slots=True)
class _Group:
    """Entries of equal rank: same kind and cost, last used in the same time slice."""

    kind: int
    cost_bucket: int
    slice: int
    rank: _Rank = (0.0, 0, 0, 0)
    members: dict[Entry, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    history: _History
    cost_bucket: int
    tick: int
    group: _Group | None = None  # None while unevictable


def _reuse_times() -> ReuseStats:
    kinds = np.arange(2 * _SEGMENT_KINDS * _USE_KINDS)
    uses = kinds % _USE_KINDS
    # Prior: more uses and a lower age are better.
    prior = (uses[:, None] + 1) / (8.0 * (np.arange(AGES) + 1))
    pools = [np.zeros_like(kinds), uses, kinds % (_SEGMENT_KINDS * _USE_KINDS), kinds]
    return ReuseStats([p.tolist() for p in pools], prior)


class Gittins:
    """Gittins index policy (docs/eviction.md).

    Time is counted in ticks: each insertion, refusal and use is one tick.
    """

    def __init__(self) -> None:
        self._held: dict[Entry, _Held] = {}
        self._prefill_cost = PrefillCost()
        self._max_cost_bucket: list[float] = [math.inf, math.inf]  # [entries without a use, used entries]
        self._tick = 0
        self._slice, self._slice_ticks = 0, _MIN_SLICE_TICKS
        self._reuse = _reuse_times()
        self._gittins_index: list[list[float]] | None = None  # computed on demand
        self._groups: dict[tuple[int, int, int], _Group] = {}
        self._ranked: SortedDict[_Rank, _Group] | None = None  # computed when a victim is needed
        self._ghosts = GhostList(_MIN_SLICE_TICKS * AGES)  # same size as after _double_slice
        # The entry that was inserted or refused last. ``_presumed_inner``: its ``inner`` is an assumption, since its
        # child may be the next insertion.
        self._newest: tuple[Entry, _Held] | None = None
        self._presumed_inner = False

    # ---- calls of the tier ----------------------------------------------------------------------------------

    def admit(self, entry: Entry, parent: Entry | None = None) -> bool:
        held = self._observe(entry, parent, 0)
        self._add_ghost(entry, held)
        if parent is not None and parent not in self._held:
            return False
        ranked = self._ranked_groups()
        return not ranked or self._rank(held.history.kind, held.cost_bucket, self._slice) > ranked.peekitem(0)[0]

    def insert(self, entry: Entry, parent: Entry | None = None, uses: int = 0) -> None:
        if entry in self._held:
            raise KeyError(f"{entry!r} is in the tier already")
        if self._newest is not None and self._newest[0] is entry and self._ghosts.take(entry.key):
            held = self._newest[1]
        else:
            held = self._observe(entry, parent, uses)
        self._held[entry] = held
        self._add_to_group(entry, held)

    def touch(self, entry: Entry) -> None:
        # Runs once per chunk of every prompt, so calls are inlined.
        held = self._held[entry]
        if self._newest is not None:
            self._settle_newest()
        unevictable = held.group is None
        if not unevictable:
            self._remove_from_group(entry, held)
        self._tick = tick = self._tick + 1
        if not tick % self._slice_ticks:
            self._next_slice()
        history = held.history
        age = self._slice - held.tick // self._slice_ticks
        self._reuse.record_reuse(history.kind, age if age < AGES else AGES - 1)
        history.use()
        held.tick = tick
        self._reuse.start_wait(history.kind)
        if not unevictable:
            self._add_to_group(entry, held)

    def make_unevictable(self, entry: Entry) -> None:
        held = self._held[entry]
        if held.group is None:
            raise KeyError(f"{entry!r} is unevictable already")
        self._remove_from_group(entry, held)

    def make_evictable(self, entry: Entry) -> None:
        held = self._held[entry]
        if held.group is not None:
            raise KeyError(f"{entry!r} is not unevictable")
        self._add_to_group(entry, held)

    def remove(self, entry: Entry) -> None:
        held = self._held.pop(entry)
        if held.group is not None:
            self._remove_from_group(entry, held)
        self._add_ghost(entry, held)
        if self._newest is not None and self._newest[0] is entry:
            self._newest = None

    def victims(self) -> Iterator[Entry]:
        return (entry for group in self._ranked_groups().values() for entry in group.members)

    def __len__(self) -> int:
        return len(self._held)

    # ---- histories ------------------------------------------------------------------------------------------

    def _observe(self, entry: Entry, parent: Entry | None, uses: int) -> _Held:
        """Return the history of a new entry and start waiting for its next use."""
        if self._newest is not None and self._newest[0] is parent and self._newest[1].history.inner:
            before: _History | None = self._newest[1].history
        else:
            self._settle_newest()
            before = None if parent is None else self._set_inner(parent, True)
        self._advance_tick()
        known = self._ghosts.take(entry.key)
        if known is None:
            reused_segments = 0 if before is None else min(before.reused_segments + (before.uses > 0), _MAX_SEGMENTS)
            history = _History(reused_segments, min(uses, _MAX_USES), inner=True)
        else:
            history = _History.of_note(known[1])
            self._reuse.record_reuse(history.kind, self._age(known[0]))
            history.use(uses)
        self._reuse.start_wait(history.kind)
        cost_bucket = round(_BUCKETS_PER_OCTAVE * math.log2(self._prefill_cost.cost_per_byte(entry)))
        held = _Held(history, cost_bucket, self._tick)
        self._newest, self._presumed_inner = (entry, held), known is None
        return held

    def _settle_newest(self) -> None:
        """Mark the newest entry as the last of its prompt: no child followed."""
        if self._newest is not None and self._presumed_inner:
            self._set_inner(self._newest[0], False)
        self._newest = None

    def _set_inner(self, entry: Entry, inner: bool) -> _History | None:
        """Correct ``inner`` of an entry, in the tier or a ghost. Returns its history."""
        held = self._held.get(entry)
        if held is None:
            known = self._ghosts.take(entry.key)
            if known is None:
                return None
            held = _Held(_History.of_note(known[1]), 0, known[0])
            self._correct(held, inner)
            self._ghosts.put(entry.key, held.tick, held.history.note)
        elif held.history.inner != inner:
            unevictable = held.group is None
            if not unevictable:
                self._remove_from_group(entry, held)
            self._correct(held, inner)
            if not unevictable:
                self._add_to_group(entry, held)
        return held.history

    def _correct(self, held: _Held, inner: bool) -> None:
        age = self._age(held.tick)
        self._reuse.drop_wait(held.history.kind, age)
        held.history.correct(inner)
        self._reuse.start_wait(held.history.kind, age)

    def _add_ghost(self, entry: Entry, held: _Held) -> None:
        lost = self._ghosts.put(entry.key, held.tick, held.history.note)
        if lost is not None:
            self._reuse.drop_wait(_History.of_note(lost[1]).kind, self._age(lost[0]))

    # ---- time and order -------------------------------------------------------------------------------------

    def _age(self, tick: int) -> int:
        return min(self._slice - tick // self._slice_ticks, AGES - 1)

    def _advance_tick(self) -> None:
        self._tick += 1
        if not self._tick % self._slice_ticks:
            self._next_slice()

    def _next_slice(self) -> None:
        self._slice += 1
        self._reuse.advance_slice()
        if self._slice_ticks * AGES < _HISTORY_FACTOR * len(self._held):
            self._double_slice()
        elif self._slice % _SLICES_PER_FIT == 0:
            self._gittins_index = None
        self._close_oldest()
        self._ranked = None

    def _double_slice(self) -> None:
        """Double the length of time slices and replace the ghost list.

        A tier that still grows has evicted little, so this loses few ghosts.
        """
        self._slice_ticks *= 2
        self._slice = self._tick // self._slice_ticks
        self._reuse.double_slice()
        self._gittins_index = None
        self._ghosts = GhostList(min(self._slice_ticks * AGES, _MAX_GHOSTS))
        self._groups.clear()
        self._ranked = None
        for entry, held in self._held.items():
            self._reuse.start_wait(held.history.kind, self._age(held.tick))
            if held.group is not None:
                self._add_to_group(entry, held)

    def _close_oldest(self) -> None:
        """Merge entries of the last age into one group for each kind and cost."""
        for group in [g for g in self._groups.values() if g.slice != _OLDEST and self._is_oldest(g.slice)]:
            del self._groups[group.kind, group.cost_bucket, group.slice]
            oldest = self._groups.setdefault(
                (group.kind, group.cost_bucket, _OLDEST), _Group(group.kind, group.cost_bucket, _OLDEST)
            )
            for entry in group.members:
                oldest.members[entry] = None
                self._held[entry].group = oldest

    def _is_oldest(self, slice_: int) -> bool:
        return self._slice - slice_ >= AGES - 1

    def _ranked_groups(self) -> SortedDict[_Rank, _Group]:
        """Return the groups by rank, which are sorted on demand: a tier with free space never needs the order."""
        if self._ranked is None:
            if self._prefill_cost.median:  # bounds a writer's claim by the claims of others
                self._max_cost_bucket = [
                    round(_BUCKETS_PER_OCTAVE * math.log2(self._prefill_cost.clamp(math.inf, used)))
                    for used in (False, True)
                ]
            for group in self._groups.values():
                group.rank = self._rank(group.kind, group.cost_bucket, group.slice)
            self._ranked = SortedDict({g.rank: g for g in self._groups.values()})
        return self._ranked

    def _rank(self, kind: int, cost_bucket: int, slice_: int) -> _Rank:
        if self._gittins_index is None:
            self._gittins_index = self._reuse.gittins_index().tolist()
        age = AGES - 1 if slice_ == _OLDEST else self._slice - slice_
        clamped = min(cost_bucket, self._max_cost_bucket[kind % _USE_KINDS > 0])
        return self._gittins_index[kind][age] * 2.0 ** (clamped / _BUCKETS_PER_OCTAVE), slice_, kind, cost_bucket

    def _add_to_group(self, entry: Entry, held: _Held) -> None:
        slice_ = held.tick // self._slice_ticks
        if self._is_oldest(slice_):
            slice_ = _OLDEST
        key = held.history.kind, held.cost_bucket, slice_
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(*key)
            if self._ranked is not None:
                group.rank = self._rank(*key)
                self._ranked[group.rank] = group
        group.members[entry] = None
        held.group = group

    def _remove_from_group(self, entry: Entry, held: _Held) -> None:
        group, held.group = held.group, None
        assert group is not None, "an unevictable entry is in no group"
        del group.members[entry]
        if not group.members:
            del self._groups[group.kind, group.cost_bucket, group.slice]
            if self._ranked is not None:
                del self._ranked[group.rank]

    def check_integrity(self) -> None:
        """Raise AssertionError unless groups, ranks and waits match the entries and ghosts."""
        waiting = np.zeros_like(self._reuse.waiting)
        for held in self._held.values():
            waiting[held.history.kind, self._age(held.tick)] += 1
        for tick, note in self._ghosts:
            waiting[_History.of_note(note).kind, self._age(tick)] += 1
        assert np.array_equal(waiting, self._reuse.waiting), "somebody is waited for who is not known, or the reverse"
        offered = {entry: group for group in self._groups.values() for entry in group.members}
        assert offered == {e: h.group for e, h in self._held.items() if h.group is not None}, "a group is wrong"
        ranked = self._ranked_groups()
        assert {id(g) for g in ranked.values()} == {id(g) for g in self._groups.values()}, "a group has no rank"
        for rank, group in ranked.items():
            assert rank == group.rank == self._rank(group.kind, group.cost_bucket, group.slice), "a rank is not today's"
