"""Host overflow: blocks in host memory behind a device's pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kvkernels.device.device_port import DeviceLacks
from kvsidecar.errors import ConfigurationError, OverflowFailed

from inference_svc.kv_pool import host_overflow
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.host_overflow import HostOverflow
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import CachedSequence, CacheScope, PrefixCache, StoredPrefix
from inference_svc.models.loader import load
from inference_svc.server import overflow_builder
from inference_svc.server.overflow_builder import open_overflow
from inference_svc.server.worker_config import WorkerConfig
from tests.kvkernels.device import contract_devices
from tests.kvkernels.device.simulated_device import SimulatedDevice

device = contract_devices.device  # fixture
simulated = contract_devices.simulated  # fixture
SHAPE = (3, 2, 64)
PER_TOKEN = KVPool.bytes_per_token(*SHAPE, torch.bfloat16)


def made(device: SimulatedDevice, tokens: int = 1024) -> KVPool:
    overflow = HostOverflow(device.extended, *SHAPE, 128, tokens, torch.bfloat16)
    return KVPool(*SHAPE, 128, torch.bfloat16, device.torch, (), overflow)


def test_device_and_host_are_one_tensor(device: SimulatedDevice) -> None:
    pool = made(device)
    assert (pool.pages, pool.overflow_pages >= 32) == (4, True)
    inside, apart = pool.allocate(128), pool.allocate_overflow(1000)
    assert inside is not None
    assert apart is not None
    pool.reserve_overflow(apart, 0, 1000)
    assert apart.first_slot == pool.first_overflow_slot
    everything = torch.from_numpy(apart.slots(0, 1000)).to(device.torch)
    assert not pool.keys.index_select(2, everything).cpu().any(), "attention reads behind a sequence's end"
    drawn = torch.randn(3, 2, 128, 64).bfloat16()
    pool.values[:, :, :128] = drawn.to(device.torch)
    pool.copy(inside, apart, 3, 97)
    there = torch.from_numpy(apart.slots(3, 97)).to(device.torch)
    assert torch.equal(pool.values.index_select(2, there).cpu(), drawn[:, :, 3:97])
    pool.free(apart)
    pool.check_integrity()


def test_not_a_number_does_not_reach_the_next_owner(simulated: object) -> None:
    device = simulated()  # type: ignore[operator]
    pool = made(device)
    table = pool.allocate_overflow(200)
    assert table is not None
    pool.reserve_overflow(table, 0, 200)
    slots = torch.from_numpy(table.slots(0, 200)).to(device.torch)
    pool.keys.index_fill_(2, slots[10:20], torch.nan)
    assert pool.are_finite(table.slots(0, 200)).tolist() == [not 10 <= i < 20 for i in range(200)]
    pool.zero_exclusive(table)
    assert pool.are_finite(table.slots(0, 200)).all()
    pool.free(table)


def test_a_failed_request_takes_no_host_memory(simulated: object) -> None:
    """It has blocks for its longest answer, and may have failed because the host has no memory for them."""
    pool = made(simulated(), 4096)  # type: ignore[operator]
    table = pool.allocate_overflow(4000)
    assert table is not None
    pool.reserve_overflow(table, 0, 100)
    pool.zero_exclusive(table)
    written = pool.are_finite(table.slots(0, 4000))  # memory that was never written is NaN
    assert written[:640].all()
    assert not written[640:].any()
    pool.free(table)


def test_host_memory_is_not_device_memory(simulated: object) -> None:
    device = simulated()  # type: ignore[operator]
    free = device.free_bytes()
    pool = made(device, 1 << 20)
    assert free - device.free_bytes() < 2048 * PER_TOKEN
    assert pool.overflow_pages * PAGE_TOKENS >= 1 << 20
    del pool
    assert device.free_bytes() == free


def test_a_full_host_is_that_requests_error(simulated: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = made(simulated())  # type: ignore[operator]
    table, other = pool.allocate_overflow(256), pool.allocate_overflow(256)
    assert table is not None
    assert other is not None
    pool.reserve_overflow(table, 0, 256)
    monkeypatch.setattr(host_overflow, "free_bytes", lambda: 100 * PER_TOKEN)
    with pytest.raises(OverflowFailed, match="the host has no room for"):
        pool.reserve_overflow(other, 0, 256)
    cache = PrefixCache(pool, 4)
    cached = pool.allocate_overflow(96)
    assert cached is not None
    cache.insert(CachedSequence(np.arange(96, dtype=np.uint32), cached, CacheScope(), StoredPrefix()))
    with pytest.raises(OverflowFailed):
        cache.reserve_overflow(other, 0, 256)
    assert cache.tables == [cached], "its eviction would give no memory back"
    pool.reserve_overflow(other, 0, 96)
    first = table.first_slot
    pool.free(table)
    again = pool.allocate_overflow(256)
    assert again is not None
    assert again.first_slot == first
    pool.reserve_overflow(again, 0, 256)  # its blocks have kept their memory


def test_free_memory_is_read_after_the_device_took_what_was_reserved(
    simulated: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several sequences may be preempted in one step, and the device zeroes their memory later than the call."""
    device, waits = simulated(), list[int]()  # type: ignore[operator]
    pool = made(device)
    tables = [pool.allocate_overflow(256) for _ in range(2)]

    def free() -> int:
        waits.append(device.clock.num_host_waits)
        return 1 << 30

    monkeypatch.setattr(host_overflow, "free_bytes", free)
    for table in tables:
        assert table is not None
        pool.reserve_overflow(table, 0, 256)
    assert waits[0] < waits[1]


def test_a_size_is_checked_at_the_start(simulated: object, monkeypatch: pytest.MonkeyPatch) -> None:
    device = simulated()  # type: ignore[operator]
    loaded = replace(load("demo", dtype="float32"), device=device.torch)
    per_token = KVPool.bytes_per_token(loaded.layers, loaded.kv_heads, loaded.head_dim, loaded.dtype)

    def opened(**settings: object) -> int:
        found = open_overflow(WorkerConfig(model="demo", **settings), loaded, 512)  # type: ignore[arg-type]
        return 0 if found is None else found.pages * PAGE_TOKENS

    assert opened() == 0, "auto"
    assert opened(overflow_bytes=0) == 0
    assert opened(overflow_bytes=1024 * per_token) == 1024
    assert opened(overflow_bytes="1GiB") == loaded.context_length
    with pytest.raises(ConfigurationError, match="holds 100 tokens; the pool itself holds 512: it must be"):
        opened(overflow_bytes=100 * per_token)
    with monkeypatch.context() as patch:
        patch.setattr(overflow_builder, "free_bytes", lambda: 1000 * per_token)
        with pytest.raises(ConfigurationError, match="of host memory are free"):
            opened(overflow_bytes=1024 * per_token)

    def refused(*_: int) -> None:
        raise DeviceLacks("no managed memory")

    monkeypatch.setattr(device, "extended", refused)
    with pytest.raises(ConfigurationError, match="cannot extend its pool into host memory: no managed memory; leave"):
        opened(overflow_bytes="1GiB")
