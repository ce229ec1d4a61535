"""How many cores are left, by what the kernel counted as idle and what this process used itself."""

from __future__ import annotations

import os

import pytest

from cache_daemon.durable import compression_policy
from cache_daemon.durable.compression_policy import CompressionPolicy, CpuSample, IdleCoreCounter
from tests.cache_daemon.durable.test_payload_codec import trained_chunks


class Clock:
    """A simulated machine: the test sets how idle its cores are, and it sums the seconds of all waits.

    ``left`` is the number of CPUs that this process's control group leaves unused.
    """

    def __init__(self) -> None:
        self.at = self.idle_seconds = self.left_seconds = self.own_seconds = self.waited = 0.0
        self.idle, self.left, self.own = 2.0, 100.0, 0.0

    def passes(self, seconds: float) -> None:
        self.at += seconds
        self.idle_seconds += self.idle * seconds
        self.left_seconds += self.left * seconds
        self.own_seconds += self.own * seconds

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.passes(seconds)

    def look(self) -> CpuSample:
        return CpuSample(self.at, (self.idle_seconds, self.left_seconds), self.own_seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cores(clock: Clock) -> IdleCoreCounter:
    return IdleCoreCounter(clock.look, clock.wait)


def test_the_first_look_and_one_after_a_pause_take_a_moment(clock: Clock, cores: IdleCoreCounter) -> None:
    assert cores.count() == pytest.approx(2)
    assert clock.waited == pytest.approx(0.05)
    clock.passes(100)
    clock.idle = 0
    assert cores.count() == pytest.approx(0), "what was a minute ago does not count"
    assert clock.waited == pytest.approx(0.1)
    clock.passes(0.5)
    clock.idle = 1
    clock.passes(0.5)
    assert cores.count() == pytest.approx(0.5)
    assert clock.waited == pytest.approx(0.1)


def test_what_this_process_uses_itself_is_not_another_s(clock: Clock, cores: IdleCoreCounter) -> None:
    cores.count()
    clock.idle, clock.own = 0.25, 1.5
    clock.passes(0.2)
    assert cores.count() == pytest.approx(1.75)


def test_a_container_leaves_no_more_than_its_limit(clock: Clock, cores: IdleCoreCounter) -> None:
    cores.count()
    clock.idle, clock.left, clock.own = 60, 0.5, 1
    clock.passes(0.2)
    assert cores.count() == pytest.approx(1.5)


def test_a_sample_has_the_groups_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression_policy, "unused_cpu_seconds", lambda now: [now + 5])
    sample = compression_policy.cpu_sample()
    assert sample.unused[1:] == (sample.at + 5,)


def test_too_short_a_time_says_what_was_said(clock: Clock, cores: IdleCoreCounter) -> None:
    assert cores.count() == pytest.approx(2)
    clock.idle = 0
    clock.passes(0.01)
    assert cores.count() == pytest.approx(2)
    clock.passes(0.05)
    assert cores.count() == pytest.approx(0)


def test_this_machine_says_something_or_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 <= IdleCoreCounter().count() <= (os.cpu_count() or 1) * 1.5
    monkeypatch.setattr(compression_policy, "_STAT", compression_policy.Path("/nowhere"))
    assert IdleCoreCounter().count() == os.cpu_count()


@pytest.mark.parametrize("mode", ["auto", "zstd"])
def test_what_comes_while_all_cores_compute_is_stored_raw(mode: compression_policy.Compression, clock: Clock) -> None:
    trained = trained_chunks()[:1]
    packer = CompressionPolicy(mode, IdleCoreCounter(clock.look, clock.wait))
    packer.active = True
    (small,) = packer.compress(trained)
    assert small is not None
    clock.idle = 0
    clock.passes(0.5)
    (stored,) = packer.compress(trained)
    assert stored == (None if mode == "auto" else small), "who asks for zstd gets it"
    clock.idle = 2
    clock.passes(0.5)
    assert packer.compress(trained) == [small]
    packer.close()
