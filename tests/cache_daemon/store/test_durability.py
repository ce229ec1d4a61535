"""State that outlives the daemon, and state that must not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from kvsidecar.cache.v1.cache_pb2 import DeleteRequest, PinRequest, PrefixRef, UnpinRequest
from kvsidecar.errors import StoreUnavailable

from benchmarks.node import Node
from cache_daemon.durable.lmdb_tier import LmdbTier
from tests.cache_daemon.conftest import Peer, payload_of, store_file


def fill(node: Node, chunks: int) -> list[list[int]]:
    peer = Peer(node)
    stored = [[i, i + 1, i + 2] for i in range(chunks)]
    for ids in stored:
        peer.put(ids)
    node.settle()
    peer.close()
    return stored


def count_readable(node: Node, stored: list[list[int]]) -> int:
    peer = Peer(node)
    try:
        return sum(peer.read(ids) == len(ids) for ids in stored)
    finally:
        peer.close()


def test_a_killed_daemon_loses_nothing_that_was_durable(start: Callable[..., Node]) -> None:
    node = start()
    stored = fill(node, 40)
    node.kill("daemon")
    node.start_daemon()
    assert node.cache_stats().chunks == 40
    assert count_readable(node, stored) == 40


def test_a_pin_and_its_end_hold_when_the_daemon_is_killed_at_once(start: Callable[..., Node]) -> None:
    node = start()
    for round_ in range(4):
        peer = Peer(node)
        prefix = PrefixRef(namespace=peer.namespace, prefix_hash=peer.put([round_, 1, 2]))
        node.settle()
        peer.stub.Pin(PinRequest(prefix=prefix), timeout=20)
        for was_pinned in (True, False):
            node.kill("daemon")
            node.start_daemon()
            assert bool(node.cache_stats().pinned_bytes) is was_pinned, round_
            if was_pinned:
                Peer(node).stub.Unpin(UnpinRequest(prefix=prefix), timeout=20)
        peer.close()


def test_what_was_deleted_stays_so_when_the_daemon_is_killed_at_once(start: Callable[..., Node]) -> None:
    node = start()
    for round_ in range(4):
        stored = fill(node, 100)
        peer = Peer(node)
        assert peer.stub.Delete(DeleteRequest(), timeout=20).deleted == 100
        node.kill("daemon")
        node.start_daemon()
        peer.close()
        assert node.cache_stats().chunks == 0, round_
        assert count_readable(node, stored) == 0


def test_a_killed_daemon_leaves_no_memory_behind_even_if_a_hung_worker_maps_it(start: Callable[..., Node]) -> None:
    """The memory was once a file in /dev/shm; with a small /dev/shm and a hung worker, the next daemon had no room."""
    node = start()
    hung = Peer(node, heartbeats=False)
    hung.put([1, 2, 3])
    node.settle()
    found = hung.match([1, 2, 3])
    assert "/dev/shm/" not in Path(f"/proc/{node.pid('daemon')}/maps").read_text()
    for _ in range(2):
        node.kill("daemon")
        node.start_daemon()
    fresh = Peer(node)
    assert fresh.read([1, 2, 3]) == 3
    assert hung.is_right([1, 2, 3], found), "its own mapping is as it was"
    fresh.close()
    hung.close()


def test_kill_at_random_points_never_corrupts(start: Callable[..., Node]) -> None:
    node = start(store_bytes="1MiB")
    rng = random.Random(1)
    for round_ in range(4):
        peer = Peer(node)
        for i in range(rng.randint(5, 60)):
            peer.put([round_, i, rng.randrange(1000)])
        durable = [c for c in _list(node) if c.durable]
        node.kill("daemon")
        node.start_daemon()
        peer.close()
        left = {c.prefix_hash for c in _list(node)}
        assert {c.prefix_hash for c in durable} <= left, "a chunk listed as durable was lost"
        assert node.cache_stats().corrupt_chunks == 0


def _list(node: Node) -> list[object]:
    from kvsidecar.cache.v1.cache_pb2 import ListRequest
    from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub

    with node.cache_channel() as channel:
        return list(CacheServiceStub(channel).List(ListRequest(page_size=1000)).chunks)


def test_a_flipped_bit_is_a_miss_and_the_entry_goes(start: Callable[..., Node]) -> None:
    node = start(compression="none")
    ids = list(range(500))
    peer = Peer(node)
    peer.put(ids)
    node.settle()
    peer.close()
    node.kill("daemon")
    file = store_file(node)
    data = bytearray(file.read_bytes())
    at = data.index(payload_of(ids, 3000)[1000:1600])
    data[at] ^= 1
    file.write_bytes(data)
    node.start_daemon()
    assert count_readable(node, [ids]) == 0
    assert node.cache_stats().corrupt_chunks == 1
    assert node.cache_stats().chunks == 0
    fresh = Peer(node)
    fresh.put(ids)
    assert fresh.read(ids) == 500
    fresh.close()


def test_a_truncated_store_is_mended_at_the_start_and_serves(start: Callable[..., Node]) -> None:
    """Such a store once ended every start with SIGBUS."""
    node = start(compression="none")
    stored = fill(node, 60)
    node.kill("daemon")
    file = store_file(node)
    os.truncate(file, file.stat().st_size * 2 // 3)
    node.start_daemon()
    readable = count_readable(node, stored)
    assert 0 < readable <= 60
    peer = Peer(node)
    for ids in stored:
        if not peer.read(ids):
            peer.put(ids)
    peer.close()
    assert count_readable(node, stored) == 60


def run_daemon(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cache_daemon", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_a_file_that_is_no_store_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "data.mdb").write_bytes(b"garbage" * 5000)
    done = run_daemon("--socket", str(tmp_path / "s"), "--store", str(tmp_path / "store"), "--arena-bytes", "1MiB")
    assert done.returncode == 1
    assert "cannot open the store" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_of_another_format_is_kept_aside_with_a_message(start: Callable[..., Node]) -> None:
    node = start()
    fill(node, 1)
    node.kill("daemon")
    environment = lmdb.open(str(node.folder / "store"), max_dbs=3)
    meta = environment.open_db(b"meta")
    with environment.begin(write=True, db=meta) as txn:
        txn.put(b"format", b"99")
    environment.close()
    store = store_file(node)
    before = store.read_bytes()
    with pytest.raises(StoreUnavailable, match="has format version '99', this release needs version '2'"):
        LmdbTier(store.parent, 1 << 20)  # as a command that only reads would open it
    node.start_daemon()
    assert node.cache_stats().chunks == 0
    kept = store.with_name("data.mdb.format-99")
    assert kept.read_bytes() == before
    fill(node, 1)
    (line,) = [line for line in (node.folder / "log").read_text().splitlines() if "kept aside" in line]
    assert json.loads(line)["kept_as"] == str(kept)


def test_a_second_daemon_on_the_store_or_the_socket_is_refused(start: Callable[..., Node], tmp_path: Path) -> None:
    node = start()
    tmp_path.chmod(0o700)
    store = str(node.folder / "store")
    done = run_daemon("--socket", str(tmp_path / "s"), "--store", store, "--arena-bytes", "1MiB")
    assert done.returncode == 1
    assert "another daemon uses the store" in done.stderr
    done = run_daemon("--socket", str(node.cache_socket), "--store", "none", "--arena-bytes", "1MiB")
    assert done.returncode == 2
    assert "another daemon listens" in done.stderr
    assert node.cache_stats().chunks == 0


def test_the_durable_budget_is_kept_children_before_parents(start: Callable[..., Node]) -> None:
    node = start(store_bytes="1MiB")
    peer = Peer(node)
    for i in range(100):
        parent = peer.put([i, 1, 2, 3] * 8)
        peer.put([i] * 32, start=32, parent=parent)
    node.settle()
    durable = {c.prefix_hash for c in _list(node) if c.durable}
    stats = peer.stats()
    assert stats.durable_bytes <= 1 << 20
    assert stats.durable_evictions > 0
    peer.close()
    node.kill("daemon")
    node.start_daemon()
    kept = _list(node)
    keys_ = {c.prefix_hash for c in kept}
    assert keys_ == durable, "none lost its parent"
    assert any(c.start_position for c in kept)
    assert all(c.start_position == 0 or c.parent_prefix_hash in keys_ for c in kept)


def test_a_full_disk_keeps_serving_from_the_arena(start: Callable[..., Node], tmp_path: Path) -> None:
    """A store on a file system with no room: chunks stay usable, are not listed as durable, and nothing dies."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        node = start(store=str(small / "store"), arena_bytes="32MiB")
        peer = Peer(node)
        stored = [[i] * 400 for i in range(40)]
        for ids in stored:
            peer.put(ids)
        node.settle()
        stats = peer.stats()
        assert stats.failed_writes > 0
        assert all(peer.read(ids) == 400 for ids in stored)
        durable = [c for c in _list(node) if c.durable]
        assert len(durable) < 40
        peer.close()
        node.kill("daemon")
        node.start_daemon()
        assert {c.prefix_hash for c in durable} <= {c.prefix_hash for c in _list(node)}
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


def test_bad_settings_are_one_sentence(tmp_path: Path) -> None:
    done = run_daemon("--heartbeat-ms", "1")
    assert done.returncode == 2
    assert "heartbeat_ms is '1'" in done.stderr
    done = run_daemon("--arena-bytes", "lots")
    assert done.returncode == 2
    assert "'lots' is not a size" in done.stderr
    tmp_path.chmod(0o755)
    done = run_daemon("--socket", str(tmp_path / "s"), "--store", "none")
    assert done.returncode == 2
    assert "chmod 700" in done.stderr
    long = tmp_path / ("x" * 120)
    done = run_daemon("--socket", str(long / "s"), "--store", "none", "--arena-bytes", "1MiB")
    assert done.returncode == 2
    assert "at most 107" in done.stderr
