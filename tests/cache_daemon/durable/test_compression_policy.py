"""Whether a store compresses is decided by measuring, and what comes out of it is no slower."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cache_daemon.durable import compression_policy
from cache_daemon.durable.compression_policy import Calibration, CompressionPolicy
from tests.cache_daemon.durable.chunks import chunk, opened, store
from tests.cache_daemon.durable.test_payload_codec import trained_chunks


@pytest.mark.parametrize(
    ("disk", "unpack", "ratio", "pays_off"),
    [
        (100e6, 1e9, 0.65, True),  # a network disk
        (1.2e9, 1e9, 0.65, False),  # a local disk as fast as unpacking
        (1.2e9, 9e9, 0.65, True),
        (100e6, 1e9, 0.95, False),  # hardly smaller
    ],
)
def test_packing_pays_where_reading_less_saves_more_than_unpacking_costs(
    disk: float, unpack: float, ratio: float, pays_off: bool
) -> None:
    assert Calibration(disk, unpack, ratio).pays_off is pays_off


@pytest.mark.parametrize(("disk", "active"), [(5e6, True), (50e9, False)])
def test_auto_decides_once_there_is_enough_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: float, active: bool
) -> None:
    """The disk's speed is given; unpacking is measured on the chunks of the group."""
    asked: list[int] = []

    def speed(data: Path, entries: object) -> float:
        asked.append(1)
        return disk

    monkeypatch.setattr(compression_policy, "_disk_speed", speed)
    monkeypatch.setattr(compression_policy.IdleCoreCounter, "count", lambda _: 2.0)
    tier = opened(tmp_path, 256 << 20)
    first, *others = trained_chunks()
    store(tier, first)
    assert not asked, "one chunk is too little"
    noise = random.Random(1).randbytes(4 << 20)
    store(tier, *(chunk([i], payload=noise) for i in range(4)))
    before = tier.usage().live_bytes
    store(tier, *others)
    assert len(asked) <= 2
    store(tier, *others, first)
    grown = tier.usage().live_bytes - before
    raw = sum(len(put.payload) for put in others)
    assert (grown < 0.8 * raw) is active
    tier.close()


def test_the_disk_is_measured_for_real(tmp_path: Path) -> None:
    tier = opened(tmp_path, 256 << 20)
    puts = [chunk([i], payload=random.Random(i).randbytes(1 << 20)) for i in range(4)]
    store(tier, *puts)
    try:
        speed = compression_policy._disk_speed(tmp_path / "data.mdb", list(tier._entries.values()))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    assert 1e5 < speed < 1e11
    tier.close()


def test_a_mode_that_is_given_is_not_measured() -> None:
    assert CompressionPolicy("none").active is False
    assert CompressionPolicy("zstd").active is True
    assert CompressionPolicy("auto").active is None


def test_planes_are_looked_for_in_few_payloads_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    look = compression_policy.payload_codec.compressible_planes

    def counted(payload: memoryview, element: int) -> frozenset[int]:
        looked.append(element)
        return look(payload, element)

    monkeypatch.setattr(compression_policy.payload_codec, "compressible_planes", counted)
    store_packing = CompressionPolicy("zstd")
    noise = chunk([1], payload=random.Random(1).randbytes(300_000))
    trained = trained_chunks()[0]
    assert store_packing.compress([noise]) == [None]
    (alone,) = CompressionPolicy("zstd").compress([trained])
    looked.clear()
    for _ in range(33):
        assert store_packing.compress([trained]) == [alone], "as if it had been looked at, also after noise"
    assert len(looked) == 3
    assert store_packing.compress([noise]) == [None]
    other = chunk([1], root=bytes(32), payload=bytes(trained.payload))
    assert store_packing.compress([other]) == [alone]
    assert len(looked) == 4, "another tenant's are another model's, as far as this knows"
