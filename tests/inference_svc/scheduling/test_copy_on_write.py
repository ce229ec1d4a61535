"""Sequences of a device share a prefix in one range of the pool, and continue in another one."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import CachedSequence, CacheScope, PrefixCache, StoredPrefix, as_array
from inference_svc.scheduling import scheduler
from inference_svc.scheduling.admission import Admission
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import Sequence, SequenceState
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request

PREFIX = prompt(1, 1500)
SHARED = 5 * 256  # of the prefix, in whole steps


class DevicePool(KVPool):
    """A pool whose kernels merge ranges. In float16 on a CPU, attention needs contiguous blocks without them."""

    merges_ranges = True


class Scheduled:
    """Admission of requests to a pool of 4,096 tokens, whose sequences run on."""

    def __init__(self, kind: type[KVPool] = DevicePool) -> None:
        self.pool = kind(1, 1, 8, 4096, torch.float16, torch.device("cpu"))
        self.cache = PrefixCache(self.pool, 64)
        self.running: list[Sequence] = []
        self._admission = Admission(self.pool, self.cache, 64, 4096, PrefillBudget(0.0), NullKVConnector())

    def keep(self, ids: list[int], table: BlockTable | None = None) -> BlockTable:
        """Add a finished sequence, whose blocks stay in the pool."""
        table = table or self.pool.allocate(len(ids))
        assert table is not None
        self.cache.insert(CachedSequence(as_array(ids), table, CacheScope(), StoredPrefix()))
        return table

    def count_copies(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return a list that gets the number of tokens of each copy from now on."""
        copy, copied = self.pool.copy, list[int]()

        def counted(source: BlockTable, target: BlockTable, start: int, end: int) -> None:
            copied.append(end - start)
            copy(source, target, start, end)

        monkeypatch.setattr(self.pool, "copy", counted)
        return copied

    def admit(self, ids: list[int]) -> BlockTable | None:
        """Admit a request and compute its prompt; None if it has to wait."""
        chosen = self._admission.next(deque([sequence := Request(ids, 5).sequence]), self.running)
        assert chosen is not None
        live = [table for one in self.running if (table := one.kv.table) is not None]
        free = self.pool.pages - self.pool.count_distinct_pages(live)
        leave = scheduler.pages_to_reserve(self.pool.pages, len(live))
        if not self._admission.allocate(sequence, chosen[1], free, leave):
            return None
        sequence.kv.advance(len(ids) - sequence.kv.num_computed)
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)
        self.pool.check_integrity()
        assert self.pool.references_match(
            [*live, *self.cache.tables, *([sequence.kv.table] if sequence.kv.table else [])]
        )
        return sequence.kv.table


def test_prompts_that_agree_a_little_further_share_the_same_blocks() -> None:
    at = Scheduled()
    first = at.keep(PREFIX + prompt(2, 100))
    tables = [at.admit(PREFIX[:end] + prompt(end, 90)) for end in (1500, 1440, 1300)]
    for table in tables:
        assert table is not None
        assert table.ranges[0] == (first.ranges[0][0], SHARED // PAGE_TOKENS)
        assert len(table.ranges) == 2


def test_a_prefix_below_the_minimum_is_copied() -> None:
    at = Scheduled()
    at.keep(PREFIX)
    table = at.admit(PREFIX[:1023] + prompt(2, 90))
    assert table is not None
    assert table.first_slot is not None


def test_cached_sequences_make_way_for_the_own_range() -> None:
    """Without it, the sequence would run in many ranges, and no step with it could be recorded."""
    at = Scheduled()
    first = at.keep(PREFIX)
    others = [at.keep(prompt(10 + i, 250)) for i in range(10)]
    for entry in at.cache.entries[1::2]:  # those that go first are not neighbours
        at.cache.touch(entry)
    assert at.pool.free_pages * PAGE_TOKENS < 300
    table = at.admit(PREFIX + prompt(3, 400))
    assert table is not None
    assert len(table.ranges) == 2
    assert table.ranges[0][0] == first.ranges[0][0]
    assert len(at.cache) < 1 + len(others)
    assert first in at.cache.tables, "the source is the last to go"


def test_cached_sequences_stay_if_they_cannot_make_way_for_the_own_range() -> None:
    """A running sequence divides the pool into two halves, and the own range is longer than either."""
    at = Scheduled()
    for i in range(4):
        at.keep(prompt(10 + i, 320))
    assert at.admit(PREFIX) is not None
    for i in range(4):
        at.keep(prompt(20 + i, 320))
    for entry in at.cache.entries[::2]:
        at.pool.free(at.cache.take(entry))
    assert (len(at.cache), at.pool.free_pages) == (4, 40)
    table = at.admit(PREFIX + prompt(3, 1100))
    assert table is not None
    assert len(at.cache) == 4
    assert len(table.ranges) > 2


def test_a_prefix_that_a_sequence_runs_on_needs_no_blocks_though_it_is_cached_too() -> None:
    at, prefix = Scheduled(), prompt(7, 2048)
    at.keep(prefix + prompt(9, 96))
    for i in range(12):
        table = at.admit(prefix + prompt(20 + i, 40))
        assert table is not None
        assert len(table.ranges) == 2


def test_a_long_rest_of_a_prefix_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between tables of several ranges, a copy needs as much memory again."""
    at = Scheduled()
    at.keep(PREFIX + prompt(9, 100))
    whole = PREFIX + prompt(4, 900)
    assert at.admit(whole) is not None
    copied = at.count_copies(monkeypatch)
    table = at.admit(whole + prompt(5, 30))
    assert table is not None
    assert table.ranges[0][1] == SHARED // PAGE_TOKENS
    assert sum(copied) == len(whole) - SHARED
    assert max(copied) <= 1024


def test_a_long_prefix_in_many_ranges_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    at, ids = Scheduled(KVPool), PREFIX[:1440]
    between = list[BlockTable]()
    table = BlockTable()
    for end in (480, 960, 1440):
        assert at.pool.grow(table, end)
        other = at.pool.allocate(32)
        assert other is not None
        between.append(other)
    for other in between:
        at.pool.free(other)
    assert len(table.ranges) == 3
    at.pool.keys[0, 0, torch.from_numpy(table.slots(0, 1440)), 0] = torch.arange(1440.0).half()
    at.keep(ids, table)
    copied = at.count_copies(monkeypatch)
    admitted = at.admit(ids + prompt(2, 40))
    assert admitted is not None
    assert admitted.first_slot is not None
    assert sum(copied) == len(ids)
    assert max(copied) <= 1024
    slots = torch.from_numpy(admitted.slots(0, 1440))
    assert torch.equal(at.pool.keys[0, 0, slots, 0], torch.arange(1440.0).half())


@pytest.mark.parametrize("kind", [KVPool, DevicePool])
def test_a_conversation_in_two_ranges_goes_on_in_them_only_where_kernels_merge_them(kind: type[KVPool]) -> None:
    at = Scheduled(kind)
    ids = PREFIX[:640]
    table = at.pool.allocate(600)
    between = at.pool.allocate(32)
    assert table is not None
    assert between is not None
    at.pool.grow(table, 640)
    at.pool.free(between)
    assert len(table.ranges) == 2
    at.keep(ids, table)
    admitted = at.admit(ids + prompt(2, 40))
    assert admitted is not None
    assert (admitted is table) == (kind is DevicePool)
    assert (admitted.first_slot is None) == (kind is DevicePool)
