"""The overflow's pages, and how large it is."""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from kvsidecar.errors import ConfigurationError, OverflowFailed
from structlog.testing import capture_logs

from inference_svc.kv_pool import disk_overflow
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.disk_overflow import DiskOverflow
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import CachedSequence, CacheScope, PrefixCache, StoredPrefix
from inference_svc.models.loader import load
from inference_svc.scheduling.admission import Admission
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.scheduling.scheduler import SchedulerEntry, plan_step
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.server.overflow_builder import open_overflow
from inference_svc.server.worker_config import WorkerConfig
from tests.inference_svc.kv_pool.test_disk_overflow import BEYOND, LONG, METADATA, POOL, on_disk
from tests.inference_svc.server.test_load import Request


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (16, torch.float32), (8, torch.bfloat16)])
def test_memory_and_file_are_one_tensor(tmp_path: Path, head_dim: int, dtype: torch.dtype) -> None:
    beyond = DiskOverflow(tmp_path, 3, 2, head_dim, 128, 4096, dtype)
    pool = KVPool(3, 2, head_dim, 128, dtype, torch.device("cpu"), (), beyond)
    assert os.listdir(tmp_path) == [], "its name is gone, and so it is with the process"
    assert (pool.pages, pool.overflow_pages >= 128) == (4, True)
    inside, apart = pool.allocate(128), pool.allocate_overflow(pool.overflow_pages * 32)
    assert inside is not None
    assert apart is not None
    assert on_disk(pool) <= METADATA, "nothing is taken before it is needed"
    pool.reserve_overflow(apart, 0, 100)
    assert on_disk(pool) >= beyond.backed_pages * 12 * 32 * head_dim * dtype.itemsize >= 4 * 12 * 32 * head_dim
    there, here = torch.from_numpy(apart.slots(0, 100)), torch.from_numpy(inside.slots(0, 100))
    drawn = torch.randn(3, 2, 100, head_dim).to(dtype)
    pool.keys[:, :, there] = drawn
    pool.values[:, :, here] = -drawn
    assert torch.equal(pool.keys[:, :, there], drawn)
    pool.copy(inside, apart, 3, 97)
    assert torch.equal(pool.values[:, :, there[3:97]], -drawn[:, :, 3:97])
    pool.check_integrity()
    pool.free(apart)
    assert on_disk(pool) <= METADATA
    assert beyond.backed_pages == 0
    assert not pool.keys[:, :, there].any(), "who gets them next finds zeros"
    assert torch.equal(pool.values[:, :, here], -drawn)
    pool.check_integrity()


def test_where_blocks_are_not_taken_back_pages_are_cleared_and_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Btrfs does when it is full: to punch a hole it writes. Here every third strip is refused."""
    beyond = DiskOverflow(tmp_path, 3, 2, 64, 128, 4096, torch.float32)
    pool = KVPool(3, 2, 64, 128, torch.float32, torch.device("cpu"), (), beyond)
    real, asked = disk_overflow._fallocate, [0]

    def fallocate(handle: int, mode: int, at: int, size: int) -> None:
        asked[0] += 1
        if mode & disk_overflow._PUNCH_HOLE and asked[0] % 3 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle, mode, at, size)

    one, other = pool.allocate_overflow(256), pool.allocate_overflow(256)
    assert one is not None
    assert other is not None
    pool.reserve_overflow(one, 0, 256)
    pool.reserve_overflow(other, 0, 256)
    mine, theirs = (torch.from_numpy(table.slots(0, 256)) for table in (one, other))
    for tensor in (pool.keys, pool.values):
        tensor[:, :, mine], tensor[:, :, theirs] = torch.nan, 1.0
    monkeypatch.setattr(disk_overflow, "_fallocate", fallocate)
    with capture_logs() as lines:
        pool.free(one)
    assert [line["event"] for line in lines] == ["blocks of the overflow are not given back"], "once"
    pool.check_integrity()
    for tensor in (pool.keys, pool.values):
        assert not tensor[:, :, mine].any(), "who gets them next finds zeros"
        assert (tensor[:, :, theirs] == 1.0).all()
    again = pool.allocate_overflow(pool.free_overflow_pages * PAGE_TOKENS)
    assert again is not None, "none is lost"
    pool.reserve_overflow(again, 0, again.tokens)
    monkeypatch.undo()
    pool.free(again)
    pool.free(other)
    assert on_disk(pool) <= METADATA
    pool.check_integrity()


def test_a_full_disk_that_takes_nothing_back_either_is_still_that_requests_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = DiskOverflow(tmp_path, 3, 2, 64, 128, 4096, torch.float32)
    pool = KVPool(3, 2, 64, 128, torch.float32, torch.device("cpu"), (), beyond)

    def fallocate(handle: int, mode: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_overflow, "_fallocate", fallocate)
    table = pool.allocate_overflow(256)
    assert table is not None
    with pytest.raises(OverflowFailed, match="has no room for"):
        pool.reserve_overflow(table, 0, 256)
    assert beyond.backed_pages == 0
    pool.free(table)
    pool.check_integrity()


def test_a_folder_that_cannot_have_it_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=f"the folder {tmp_path}/none for the overflow cannot be used: No such"
    ):
        DiskOverflow(tmp_path / "none", 1, 1, 64, 128, 4096, torch.float32)


def test_who_waits_for_the_overflow_is_overtaken_by_those_who_do_not_need_it_only(tmp_path: Path) -> None:
    overflow = DiskOverflow(tmp_path, 1, 1, 64, POOL, BEYOND, torch.bfloat16)
    pool = KVPool(1, 1, 64, POOL, torch.bfloat16, torch.device("cpu"), (), overflow)
    admission = Admission(pool, PrefixCache(pool, 4), 128, BEYOND, PrefillBudget(0.0), NullKVConnector())
    taken = pool.allocate_overflow(BEYOND // 2)
    large, less, little = (Request(LONG[:tokens], 20).sequence for tokens in (1500, 700, 100))
    assert admission.next(deque([large, less]), []) is None
    found = admission.next(deque([large, less, little]), [])
    assert found is not None
    assert found[0] is little
    assert taken is not None
    pool.free(taken)
    found = admission.next(deque([large, less]), [])
    assert found is not None
    assert found[0] is large


def test_entries_are_evicted_only_if_that_makes_enough_room(tmp_path: Path) -> None:
    overflow = DiskOverflow(tmp_path, 1, 1, 64, POOL, BEYOND, torch.bfloat16)
    pool = KVPool(1, 1, 64, POOL, torch.bfloat16, torch.device("cpu"), (), overflow)
    cache, room = PrefixCache(pool, 4), pool.overflow_pages * PAGE_TOKENS
    used, kept = pool.allocate_overflow(256), pool.allocate_overflow(512)
    assert used is not None
    assert kept is not None
    cache.insert(CachedSequence(np.arange(512, dtype=np.uint32), kept, CacheScope(), StoredPrefix()))
    assert cache.allocate_overflow(room - 256 + 1) is None
    assert cache.tables == [kept]
    found = cache.allocate_overflow(room - 256)
    assert found is not None
    assert cache.tables == []
    pool.check_integrity()


def test_whose_pages_are_the_overflows_gives_none_to_others() -> None:
    apart = SchedulerEntry(arrived_at=0.0, num_uncomputed=1, free_slots=9, exclusive_pages=0, in_overflow=True)
    old, young = (
        SchedulerEntry(arrived_at=1.0, num_uncomputed=1, free_slots=0, exclusive_pages=4),
        SchedulerEntry(arrived_at=2.0, num_uncomputed=1, free_slots=0, exclusive_pages=4),
    )
    for order in ([apart, old, young], [old, apart, young], [old, young, apart]):
        step = plan_step(order, 64, 0, 32)
        assert [order[i] for i in step.preempted] == [young]
        assert sorted(order[i].arrived_at for i, _ in step.rows) == sorted([apart.arrived_at, old.arrived_at])
    assert plan_step([apart, old], 64, 0, 32).preempted == (), "it waits for those that are being stored"


def test_auto_has_what_the_longest_context_needs_and_no_more_than_a_share_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loaded = tmp_path / "overflow", load("demo", dtype="float32")
    per_token = KVPool.bytes_per_token(loaded.layers, loaded.kv_heads, loaded.head_dim, loaded.dtype)

    def opened(pool: int, **settings: Any) -> int:
        config = WorkerConfig(model="demo", **{"overflow_dir": folder} | settings)
        found = open_overflow(config, loaded, pool)
        return 0 if found is None else found.pages * PAGE_TOKENS

    assert opened(loaded.context_length) == 0, "the pool holds it"
    assert not folder.exists()
    assert opened(512) == loaded.context_length
    assert list(folder.iterdir()) == []
    assert opened(512, overflow_bytes=0) == 0
    assert opened(512, overflow_bytes=str(1024 * per_token)) == 1024
    assert opened(512, overflow_bytes="1GiB") == loaded.context_length
    with pytest.raises(ConfigurationError, match="holds 100 tokens; the pool itself holds 512: it must be"):
        opened(512, overflow_bytes=100 * per_token)
    blocked = tmp_path / "file"
    blocked.touch()
    assert opened(512, overflow_dir=blocked) == 0, "auto does without"
    with pytest.raises(ConfigurationError, match="cannot create the folder"):
        opened(512, overflow_dir=blocked, overflow_bytes="1GiB")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * 800 * per_token))
    assert opened(512) == 800
    assert opened(1024) == 0
    partition = SimpleNamespace(mountpoint=str(folder), fstype="tmpfs")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [partition])
    assert opened(512) == 0, "in memory it is no help"
