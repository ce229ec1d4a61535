"""Refill of a real server that lost its data while nodes hold the chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.condition_wait import until_async
from benchmarks.node import Node
from benchmarks.peer import Peer
from benchmarks.remote_servers import RedisServer, why_no_valkey
from cache_daemon.remote import deletion_epochs, tombstone_sync
from cache_daemon.remote.address import Credentials, parse_remote
from cache_daemon.remote.redis_backend import RedisBackend
from cache_daemon.remote.write_behind import RemoteWrite
from tests.cache_daemon.operators import cache
from tests.cache_daemon.remote.nodes import node, prompt

pytestmark = pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
IDS, OTHER = prompt(4), prompt(3, 1)
SOON = 30.0


def backend_of(server: RedisServer) -> RedisBackend:
    return RedisBackend(parse_remote(server.url), Credentials("", None))


def flush(server: RedisServer) -> None:
    """Remove all data while the connections stay."""
    server.command("FLUSHALL")


def restart_at_once(server: RedisServer) -> None:
    """Restart so fast that the nodes' clients connect again without an error."""
    server.stop()
    server.start()


def heads(server: RedisServer) -> int:
    return len(server.command("KEYS", "*/head"))


@pytest.mark.parametrize("lose", [flush, restart_at_once])
@pytest.mark.parametrize("write", ["second-use", "all"])
async def test_a_server_that_lost_its_data_is_filled_again_without_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lose: Callable[[RedisServer], None], write: RemoteWrite
) -> None:
    monkeypatch.setattr(deletion_epochs, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(tombstone_sync, "_POLL_SECONDS", 0.1)
    with RedisServer(tmp_path) as server:
        async with node(backend_of(server), write=write) as a, node(backend_of(server), write=write) as b:
            await a.share(IDS, b"one")
            await a.read(OTHER, b"two")  # used once
            await a.sent()
            count = heads(server)
            assert count == (4 if write == "second-use" else 7)
            await until_async(lambda: a.stats.remote_refilling_tenants == 0, SOON)
            assert a.stats.remote_data_losses == 0
            lose(server)
            await until_async(lambda: a.stats.remote_data_losses > 0 and a.stats.remote_refilling_tenants == 0, SOON)
            await a.sent()
            assert heads(server) == count
            assert a.stats.remote_data_losses == 1
            assert (await b.ask(IDS, b"one"))[0] == len(IDS)


async def test_a_node_that_only_reads_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deletion_epochs, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(tombstone_sync, "_POLL_SECONDS", 0.05)
    with RedisServer(tmp_path) as server:
        async with node(backend_of(server), write="never") as a:
            await a.share(IDS)
            flush(server)
            await asyncio.sleep(0.5)
            assert server.command("KEYS", "*") == []
            assert a.stats.remote_refilling_tenants == 0


def test_push_fills_a_server_that_restarted_empty(start: Callable[..., Node], tmp_path: Path) -> None:
    """The command does not wait for the grace period."""
    with RedisServer(tmp_path) as server:
        here = start(remote=server.url, remote_write="all")
        peer = Peer(here)
        begin = peer.put([1, 2])
        peer.put([3], 2, begin)
        deadline = time.monotonic() + SOON
        while here.cache_stats().remote_written_chunks < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        restart_at_once(server)
        while not here.cache_stats().remote_data_losses:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert cache("push", peer.namespace.hex(), of=here).startswith("pushed 2 chunks (")
        assert heads(server) == 2
