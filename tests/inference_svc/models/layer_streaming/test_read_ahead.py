"""Slots: read ahead, fenced by use counts, poisoned when released, and honest about what could not be read."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_svc.models.layer_streaming.read_ahead import Poison, Read, ReadAhead, WeightsUnreadable

PIECES, POISONED = 5, -1


class Disk:
    """Simulated disk on which every value of piece ``n`` is ``n``.

    A read into a slot that is in ``held`` is recorded in ``hazards``, because a step may still use the slot.
    """

    def __init__(self, slots: int) -> None:
        self.memory: NDArray[np.int64] = np.full((slots, 64), POISONED)
        self.reads: list[int] = []
        self.held: set[int] = set()
        self.hazards: list[int] = []
        self.failing: set[int] = set()
        self.open, self.begun = threading.Event(), threading.Event()
        self.open.set()

    def read(self, piece: int, slot: int, go_on: Callable[[], bool]) -> int:
        self.reads.append(piece)
        self.begun.set()
        self.open.wait(30)
        if slot in self.held:
            self.hazards.append(slot)
        if piece in self.failing:
            raise OSError(5, "Input/output error")
        self.memory[slot] = POISONED  # half of it is there
        if not go_on():
            return 8
        self.memory[slot] = piece
        return 16

    def poison(self, slot: int) -> None:
        self.memory[slot] = POISONED


@contextmanager
def staged(slots: int, read: Read, poison: Poison | None = None, pieces: int = PIECES) -> Iterator[ReadAhead]:
    staging = ReadAhead(pieces, slots, read, poison)
    try:
        yield staging
    finally:
        staging.close()


@pytest.mark.parametrize("slots", [2, 3, 7])
@pytest.mark.parametrize("poisoned", [False, True])
def test_any_order_and_nesting_of_uses_reads_the_right_bytes(slots: int, poisoned: bool) -> None:
    disk, rng = Disk(slots), random.Random(slots)
    with staged(slots, disk.read, disk.poison if poisoned else None) as staging:
        for step in range(300):
            first = rng.choice([step % PIECES, rng.randrange(PIECES)])
            slot = staging.acquire(first)
            disk.held.add(slot)
            assert (disk.memory[slot] == first).all()
            if rng.random() < 0.3:
                assert staging.acquire(first) == slot
                staging.release(first)
                assert (disk.memory[slot] == first).all(), "it is held still"
            disk.held.discard(slot)
            staging.release(first)
    assert disk.hazards == []
    stats = staging.stats
    assert stats.hits + stats.waits + stats.misses == 300


def test_a_piece_that_is_waited_for_replaces_one_that_is_read_ahead() -> None:
    """Two of three slots are held by a caller that releases them only after the piece that it waits for."""
    disk = Disk(3)
    with staged(3, disk.read, pieces=4) as staging:
        while set(disk.memory[:, 0].tolist()) != {0, 1, 2}:
            time.sleep(0.001)
        disk.open.clear()
        disk.begun.clear()
        staging.acquire(1)
        assert disk.begun.wait(30)  # 3 is read in place of 0
        staging.release(1)
        staging.acquire(2)
        threading.Timer(0.05, disk.open.set).start()
        staging.acquire(3)
        waiting = threading.Thread(target=staging.acquire, args=(0,), daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive()
        assert set(disk.memory[:, 0].tolist()) == {0, 2, 3}


def test_the_next_pieces_are_read_while_one_is_held_across_the_end_and_no_other() -> None:
    disk = Disk(3)
    with staged(3, disk.read) as staging:
        last = PIECES - 1
        staging.acquire(last)
        while set(disk.memory[:, 0].tolist()) != {last, 0, 1}:  # those of the next forward
            disk.begun.clear()
            disk.begun.wait(0.01)
        staging.release(last)
        before = staging.stats
        for piece in (0, 1):
            staging.acquire(piece)
            staging.release(piece)
        assert staging.stats.misses == before.misses
        assert staging.stats.hits + staging.stats.waits == before.hits + before.waits + 2


def test_a_slot_that_is_held_is_not_written_to_however_slow_its_reader() -> None:
    disk = Disk(2)
    with staged(2, disk.read) as staging:
        slot = staging.acquire(0)
        other = staging.acquire(1)
        staging.release(1)
        assert staging.acquire(2) == other, "the only slot that is free"
        staging.release(2)
        assert (disk.memory[slot] == 0).all()
        staging.release(0)


def test_when_all_fit_each_is_read_once() -> None:
    disk = Disk(PIECES)
    with staged(PIECES, disk.read) as staging:
        for step in range(40):
            staging.acquire(step % PIECES)
            staging.release(step % PIECES)
    assert sorted(disk.reads) == list(range(PIECES))


def test_a_read_that_nobody_wants_any_more_is_given_up() -> None:
    disk = Disk(2)
    disk.open.clear()
    with staged(2, disk.read) as staging:
        disk.begun.wait(30)
        assert disk.reads == [0]
        threading.Timer(0.01, disk.open.set).start()
        slot = staging.acquire(3)
        assert (disk.memory[slot] == 3).all()
        staging.release(3)
        assert staging.stats.misses == 1


def test_a_read_that_was_given_up_is_begun_anew_for_who_comes_back() -> None:
    disk, given_up, back = Disk(2), threading.Event(), threading.Event()

    def read(piece: int, slot: int, go_on: Callable[[], bool]) -> int:
        if piece == 0 and not given_up.is_set():
            disk.memory[slot] = POISONED
            while go_on():
                pass
            given_up.set()
            back.wait(30)
            assert not go_on(), "half of it is there"
            return 8
        return disk.read(piece, slot, go_on)

    with staged(2, read) as staging:
        away = threading.Thread(target=lambda: (staging.acquire(3), staging.release(3)))
        elsewhere = threading.Thread(target=lambda: (staging.acquire(4), staging.release(4)))
        away.start()
        elsewhere.start()  # two slots, and two pieces that are needed more
        given_up.wait(30)
        threading.Timer(0.01, back.set).start()
        slot = staging.acquire(0)
        assert (disk.memory[slot] == 0).all()
        staging.release(0)
        away.join(30)
        elsewhere.join(30)
        assert not away.is_alive()
        assert not elsewhere.is_alive(), "who waits is served, wherever others go"


def test_a_failed_read_is_told_once_and_tried_again() -> None:
    disk = Disk(3)
    disk.failing = {2}
    with staged(3, disk.read) as staging:
        for piece in (0, 1):
            staging.acquire(piece)
            staging.release(piece)
        for _ in range(2):
            with pytest.raises(WeightsUnreadable, match=r"could not be read from their file: .*Input/output"):
                staging.acquire(2)
        assert disk.reads.count(2) < 7, "nobody tries by itself for ever"
        disk.failing = set()
        slot = staging.acquire(2)
        assert (disk.memory[slot] == 2).all()
        staging.release(2)


def test_released_slots_are_poisoned_at_once() -> None:
    disk = Disk(2)
    with staged(2, disk.read, disk.poison) as staging:
        slot = staging.acquire(0)
        staging.acquire(0)
        staging.release(0)
        assert (disk.memory[slot] == 0).all()
        disk.open.clear()  # nobody fills it again
        staging.release(0)
        assert (disk.memory[slot] == POISONED).all()
        disk.open.set()


def test_closing_ends_whoever_waits() -> None:
    failed = list[Exception]()

    def read(piece: int, slot: int, go_on: Callable[[], bool]) -> int:
        while go_on():
            time.sleep(0.001)
        return 8

    staging = ReadAhead(PIECES, 2, read)

    def wait() -> None:
        try:
            staging.acquire(3)
        except WeightsUnreadable as error:
            failed.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not staging.stats.misses:
        time.sleep(0.001)
    staging.close()
    waiter.join(30)
    assert "shutting down" in str(failed[0])
