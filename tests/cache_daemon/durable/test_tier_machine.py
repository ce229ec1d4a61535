"""The store on disk and the reference in memory stay the same, whatever is asked and however often reopened."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_daemon.durable.durable_tier import OutOfSpace, Put, ReadResult, WriteGroup
from cache_daemon.durable.lmdb_tier import LmdbTier
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.durable.chunks import chunk, key_of, read

BUDGET = 8 << 20


def _family() -> list[Put]:
    """Three roots' children and grandchildren, and theirs: 3 + 9 + 27 chunks of different sizes."""
    found: list[Put] = []
    parents: list[Put | None] = [None]
    for depth in range(3):
        young = [
            chunk([depth, branch], parent, payload=bytes([depth, branch]) * (50 + 3000 * branch))
            for parent in parents
            for branch in range(3)
        ]
        found += young
        parents = list(young)
    return found


FAMILY = _family()
TOO_LARGE = chunk([9], payload=random.Random(1).randbytes(20_000_000))
members = st.integers(0, len(FAMILY) - 1)
names = st.sampled_from([b"pin", b"verdict", b"8 bytes!", b"n" * 300])


class Tiers(RuleBasedStateMachine):
    """Applies random groups of changes to the LMDB tier and to ``MemoryTier``, and compares both."""

    @initialize(key=st.sampled_from([None, b"k" * 32]), compression=st.sampled_from(["none", "zstd"]))
    def start(self, key: bytes | None, compression: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.options = {"key": key, "compression": compression}
        self.memory = MemoryTier()
        self.open()

    def open(self) -> None:
        self.tier = LmdbTier(self.folder, BUDGET, **self.options)  # type: ignore[arg-type]
        self.loaded = list(self.tier.load())

    @rule(
        remove=st.lists(members, max_size=2),
        put=st.lists(st.tuples(members, st.lists(members, max_size=2)), max_size=6),
        notes=st.dictionaries(names, st.none() | st.binary(max_size=5000), max_size=2),
        used=st.dictionaries(members, st.integers(0, 2**63), max_size=3),
    )
    def apply(
        self,
        remove: list[int],
        put: list[tuple[int, list[int]]],
        notes: dict[bytes, bytes | None],
        used: dict[int, int],
    ) -> None:
        puts = tuple(
            Put(FAMILY[one].header, FAMILY[one].payload, tuple(key_of(FAMILY[old]) for old in olds))
            for one, olds in put
        )
        ticks = {key_of(FAMILY[one]): tick for one, tick in used.items()}
        group = WriteGroup(tuple(key_of(FAMILY[one]) for one in remove), puts, notes, ticks)
        mine, theirs = self.tier.apply(group), self.memory.apply(group)
        assert [result.outcome for result in mine] == [result.outcome for result in theirs]

    @rule()
    def refuse(self) -> None:
        """Check that a group with a chunk that can never fit changes nothing."""
        try:
            self.tier.apply(WriteGroup(tuple(map(key_of, FAMILY)), (TOO_LARGE,), {b"x": b""}))
        except OutOfSpace:
            return
        raise AssertionError("20 MB were stored in a map of 12 MB")

    @rule()
    def compact(self) -> None:
        self.tier.compact()

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.open()
        seen: set[bytes] = set()
        for loaded in self.loaded:
            assert loaded.header.parent_prefix_hash in seen | {loaded.header.root}
            seen.add(loaded.header.prefix_hash)
        assert {(loaded.header.prefix_hash, loaded.last_use) for loaded in self.loaded} == {
            (loaded.header.prefix_hash, loaded.last_use) for loaded in self.memory.load()
        }
        assert (self.tier.load_report.corrupt, self.tier.load_report.orphaned) == (0, 0)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert read(self.tier, *FAMILY) == read(self.memory, *FAMILY)
        assert self.tier.notes() == self.memory.notes()
        assert self.tier.usage().entries == self.memory.usage().entries
        assert (self.tier.usage().live_bytes == 0) == (self.tier.usage().entries == 0)
        assert ReadResult.CORRUPT not in read(self.tier, *FAMILY)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.folder)


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    max_examples=20, stateful_step_count=12, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
