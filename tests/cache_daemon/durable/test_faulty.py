"""The tier that fails on command does what it is told, and nothing else."""

from __future__ import annotations

import threading
import time

import pytest

from cache_daemon.durable.durable_tier import OutOfSpace, PutOutcome, ReadJob, ReadResult, TierFailed
from tests.cache_daemon.doubles.faulty_tier import FaultyTier
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.durable.chunks import chunk, is_sound, key_of, read, store


def test_writes_fail_as_often_as_told() -> None:
    tier = FaultyTier(MemoryTier())
    tier.fill_up(1)
    tier.fail_applies(1)
    with pytest.raises(OutOfSpace):
        store(tier, chunk([1]))
    with pytest.raises(TierFailed):
        store(tier, chunk([1]))
    assert tier.usage().entries == 0
    assert store(tier, chunk([1])) == [PutOutcome.STORED]


def test_reads_end_as_told_and_leave_rubbish() -> None:
    tier = FaultyTier(MemoryTier())
    put = chunk([1])
    store(tier, put)
    tier.fault_reads(1, ReadResult.FAILED)
    tier.fault_reads(1, ReadResult.CORRUPT)
    target = bytearray(put.header.payload_bytes)
    assert tier.read([ReadJob(key_of(put), memoryview(target), put.header.checksum)]) == [ReadResult.FAILED]
    assert set(target) == {0xA5}
    assert read(tier, put) == [ReadResult.CORRUPT]
    assert is_sound(tier, put)


def test_calls_wait_at_a_closed_gate() -> None:
    tier = FaultyTier(MemoryTier())
    tier.hold()
    thread = threading.Thread(target=store, args=(tier, chunk([1])))
    thread.start()
    assert tier.wait_until_held()
    assert tier.usage().entries == 0
    tier.let_go()
    thread.join()
    assert tier.usage().entries == 1
    tier.slow_seconds = 0.05
    began = time.monotonic()
    read(tier, chunk([1]))
    assert time.monotonic() - began >= 0.05
