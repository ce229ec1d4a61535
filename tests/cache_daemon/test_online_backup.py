"""Backup of a running daemon: a consistent archive under traffic, and its restore."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import DeleteRequest, PrefixRef
from kvsidecar.errors import StoreUnavailable, Unavailable

from benchmarks.node import Node
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.operators import on_store

CHAINS, LINKS = 40, 4


def put_chain(peer: Peer, first: int, salt: bytes = b"") -> list[int]:
    """Store a prompt of several chunks; return its tokens."""
    ids = [first, 1, 2] * LINKS
    peer.try_put(ids, 3, salt)
    return ids


def use(node: Node, over: threading.Event, number: int, failures: list[BaseException]) -> None:
    """Store and delete chains of one's own until the export is over."""
    peer = Peer(node)
    turn = 0
    try:
        while not over.is_set():
            turn = turn % 60 + 1  # so many chains: an export of ever more of them would not end on a slow machine
            put_chain(peer, 1_000 * number + turn)
            if turn % 3 == 0:
                root = keys.tenant_root(peer.namespace, b"")
                first = keys.prefix_hash(root, [1_000 * number + turn, 1, 2])
                peer.stub.Delete(DeleteRequest(prefix=PrefixRef(root=root, prefix_hash=first)))
    except BaseException as error:
        failures.append(error)
    finally:
        peer.close()


def test_an_archive_of_a_running_daemon_is_consistent_and_restores(start: Callable[..., Node], tmp_path: Path) -> None:
    node, archive = start(arena_bytes="1MiB"), tmp_path / "backup.kv"
    peer = Peer(node)
    kept = [put_chain(peer, number) for number in range(CHAINS)]
    put_chain(peer, 5, salt=b"another")
    over, failures = threading.Event(), list[BaseException]()
    users = [threading.Thread(target=use, args=(node, over, number, failures)) for number in (1, 2, 3)]
    for user in users:
        user.start()
    try:
        for _ in range(3):
            on_store("export", archive, "--all", "--socket", node.cache_socket)
    finally:
        over.set()
        for user in users:
            user.join()
    assert not failures
    node.settle()  # a small arena that is full of chunks on their way to disk has no place for others
    assert all(peer.read(ids) == len(ids) for ids in kept), "the daemon serves on"
    peer.close()
    node.kill("daemon", 15)

    restored = start()
    restored.kill("daemon", 15)
    on_store("import", archive, "--store", restored.folder / "store")
    assert "chunks are sound" in on_store("verify", "--store", restored.folder / "store")
    restored.start_daemon()
    peer = Peer(restored)
    assert all(peer.read(ids) == len(ids) for ids in kept)
    assert peer.match([5, 1, 2], salt=b"another").matched_tokens == 3
    peer.close()


def test_an_export_changes_neither_tiers_nor_use_counts(start: Callable[..., Node], tmp_path: Path) -> None:
    node = start(arena_bytes="1MiB")
    peer = Peer(node)
    peer.put([0] * 128)
    count = 2 * (1 << 20) // peer.list_all()[0].payload_bytes  # twice the arena
    for number in range(1, count):
        peer.put([number] * 128)
        if number % 16 == 0:
            node.settle()  # others may keep the disk for longer than a commit waits
    node.settle()
    before = {c.prefix_hash: (c.resident, c.durable, c.hits) for c in peer.list_all()}
    assert {resident for resident, _, _ in before.values()} == {True, False}
    assert f"exported {count} chunks" in on_store("export", tmp_path / "all.kv", "--all", "--socket", node.cache_socket)
    assert {c.prefix_hash: (c.resident, c.durable, c.hits) for c in peer.list_all()} == before
    peer.close()


def test_lifetimes_and_the_choice_of_tenants_hold_for_a_running_daemon(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    node = start()
    peer = Peer(node)
    peer.put([1, 2, 3], ttl=3600)
    peer.put([4, 5, 6], salt=b"another")
    root = keys.tenant_root(peer.namespace, b"").hex()
    archive = tmp_path / "one.kv"
    assert "exported 1 chunks" in on_store("export", archive, "--root", root, "--socket", node.cache_socket)
    peer.close()
    other = start()
    other.kill("daemon", 15)
    on_store("import", archive, "--store", other.folder / "store")
    other.start_daemon()
    peer = Peer(other)
    (chunk,) = peer.list_all()
    assert 3000 < chunk.ttl_seconds <= 3600
    peer.close()


def test_a_store_in_the_environment_does_not_hide_the_running_daemon(
    start: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's shell often has the daemon's settings, as its container has; the command line goes first."""
    node, archive = start(), tmp_path / "all.kv"
    peer = Peer(node)
    peer.put([1, 2, 3])
    node.settle()
    peer.close()
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", str(node.folder / "store"))
    monkeypatch.setenv("KVSIDECAR_RUNTIME_DIR", str(node.cache_socket.parent))
    assert "exported 1 chunks" in on_store("export", archive, "--all")
    monkeypatch.setenv("KVSIDECAR_CACHE_SOCKET", str(node.cache_socket))
    assert "exported 1 chunks" in on_store("export", archive, "--all")
    with pytest.raises(StoreUnavailable, match="another daemon uses the store"):
        on_store("export", archive, "--all", "--store", node.folder / "store")
    node.kill("daemon", 15)
    assert "exported 1 chunks" in on_store("export", archive, "--all")
    with pytest.raises(Unavailable, match="nothing answers at"):
        on_store("export", archive, "--all", "--socket", node.cache_socket)
