"""Deletions by other nodes, applied here, also on the disk of a node that was down meanwhile."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import ChunkNotFound, StoreUnavailable

from benchmarks.condition_wait import until_async
from benchmarks.peer import Peer
from benchmarks.remote_servers import RedisServer, why_no_valkey
from cache_daemon.durable.encryption import NullCipher
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.remote import tombstone_sync, tombstones
from cache_daemon.remote.address import Credentials, parse_remote
from cache_daemon.remote.backend import RemoteBackend
from cache_daemon.remote.backend_factory import new_backend
from cache_daemon.remote.coordinator import RemoteSettings
from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.remote_record import TenantEpochs, epoch_digest, new_epoch
from cache_daemon.remote.remote_tier import RemoteTier
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.remote.nodes import CHUNK, FleetNode, Slow, node, prompt
from tests.cache_daemon.remote.test_faults import Fleet
from tests.cache_daemon.stores import opened

SOON = 60.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstone_sync, "_POLL_SECONDS", 0.05)


class Shared:
    """A backend that survives the end of a node. ``fresh`` returns a connection for another node."""

    def __init__(self, url: str = "") -> None:
        self._url, self._one = url, InMemoryBackend()

    def fresh(self) -> RemoteBackend:
        return new_backend(parse_remote(self._url), Credentials()) if self._url else self._one


@pytest.fixture(params=["memory", "valkey"])
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shared]:
    if request.param == "memory":
        yield Shared()
        return
    if why := why_no_valkey():
        pytest.skip(why)
    with RedisServer(tmp_path / "valkey") as server:
        yield Shared(f"redis://127.0.0.1:{server.port}?prefix=e")


async def delete(a: FleetNode, what: str, ids: list[int]) -> None:
    root = a.bench.root()
    first = keys.prefix_hash(root, ids[:CHUNK])
    await a.bench.store.delete(b"" if what == "everything" else root, first if what == "chunk" else b"")
    await until_async(lambda: a.stats.remote_deletions == 0, SOON)


def disk(folder: Path) -> LmdbTier:
    return LmdbTier(folder / "b", 1 << 20)


@pytest.mark.parametrize("what", ["tenant", "chunk", "everything"])
async def test_what_another_node_deletes_goes_here_too(shared: Shared, what: str) -> None:
    async with node(shared.fresh()) as a, node(shared.fresh()) as b:
        await a.share(prompt(3))
        assert (await b.ask(prompt(3)))[0] == 3 * CHUNK
        await b.bench.store.settle()
        await delete(a, what, prompt(3))
        await until_async(lambda: b.stats.chunks == b.stats.durable_chunks == 0, SOON)
        await b.share(prompt(3))
        assert (await a.ask(prompt(3)))[0] == 3 * CHUNK, "what is read anew is shared"
        await b.read(prompt(2, 5))
        assert b.stats.chunks == 5


@pytest.mark.parametrize("what", ["tenant", "chunk", "everything"])
async def test_what_was_deleted_while_a_node_was_down_is_found_by_nobody(
    shared: Shared, what: str, tmp_path: Path
) -> None:
    ids, other = prompt(3), b"who does not"
    async with node(shared.fresh(), tier=disk(tmp_path)) as b:
        await b.share(ids)
        await b.share(ids, salt=other)
        assert b.stats.remote_written_chunks == 6
        await b.bench.store.settle()
    async with node(shared.fresh()) as a:
        assert (await a.ask(ids))[0] == 3 * CHUNK
        await delete(a, what, ids)
        await a.share(ids[:CHUNK], salt=b"after")
        async with node(shared.fresh(), tier=disk(tmp_path)) as b:
            left = 0 if what == "everything" else 3
            await until_async(lambda: b.stats.chunks == b.stats.durable_chunks == left, SOON)
            assert await b.bench.found(ids) == 0
            assert await b.bench.found(ids, salt=other) == left * CHUNK
            await b.sent()
        assert (await a.ask(ids, salt=b"after"))[0] == CHUNK
        async with node(shared.fresh()) as c:
            assert (await c.ask(ids))[0] == 0


async def test_a_node_that_comes_back_writes_nothing_of_before_a_deletion(tmp_path: Path) -> None:
    """Whatever it is asked for first, and before it has looked what was deleted."""
    engine = InMemoryBackend()
    async with node(engine, tier=disk(tmp_path)) as b:
        await b.share(prompt(3))
        await b.bench.store.settle()
    async with node(engine) as a:
        await delete(a, "tenant", prompt(3))
    async with node(engine, tier=disk(tmp_path)) as b:
        b.remote._tombstones._last_poll = None
        await b.bench.found(prompt(3))
        await b.sent()
        async with node(engine) as c:
            assert (await c.ask(prompt(3)))[0] == 0


async def test_what_is_read_after_a_deletion_outlives_restarts(tmp_path: Path) -> None:
    """Whoever deleted, and whatever clocks say: only marks that were not seen yet count."""
    engine = InMemoryBackend()
    for what in ("tenant", "chunk", "everything"):
        a_disk, b_disk = LmdbTier(tmp_path / f"a-{what}", 1 << 20), LmdbTier(tmp_path / f"b-{what}", 1 << 20)
        async with node(engine, tier=a_disk) as a, node(engine, tier=b_disk) as b:
            await a.share(prompt(3))
            await b.ask(prompt(3))
            await delete(a, what, prompt(3))
            await until_async(lambda: b.stats.chunks == 0, SOON)
            await a.share(prompt(2, 7))
            await b.share(prompt(2, 8))
            await a.bench.store.settle()
            await b.bench.store.settle()
        for folder, first in ((f"a-{what}", 7), (f"b-{what}", 8)):
            async with node(engine, tier=LmdbTier(tmp_path / folder, 1 << 20)) as again:
                await until_async(lambda of=again: of.remote._tombstones._last_poll is not None, SOON)
                assert not again.remote._tombstones._unapplied
                assert await again.bench.found(prompt(2, first)) == 2 * CHUNK
        async with node(engine) as a:
            await delete(a, "everything", [0] * CHUNK)


async def test_an_engine_that_is_away_at_the_start_is_heard_when_it_comes(tmp_path: Path) -> None:
    engine = Slow()
    async with node(engine, tier=disk(tmp_path)) as b:
        await b.share(prompt(3))
        await b.bench.store.settle()
    async with node(engine) as a:
        await delete(a, "tenant", prompt(3))
    engine.fails = True
    tier = RemoteTier(engine, KeySchema("t"), NullCipher())
    async with opened(400 * 4096, tier=disk(tmp_path), remote=RemoteSettings(tier)) as bench:
        assert await bench.found(prompt(3)) == 3 * CHUNK, "nobody knows better"
        engine.fails = False
        await until_async(lambda: bench.store.stats().chunks == 0, SOON)


async def test_an_engine_that_lost_everything_costs_no_node_what_it_has(tmp_path: Path) -> None:
    """But what is of before is not written again, nor after a restart: a deletion may have been lost as well."""
    engine = InMemoryBackend()
    async with node(engine, tier=disk(tmp_path)) as b, node(engine) as a:
        await b.share(prompt(3))
        await b.bench.store.settle()
        engine.values.clear()
        await a.share(prompt(2, 4))
        assert (await b.ask(prompt(2, 4)))[0] == 2 * CHUNK
        assert await b.bench.found(prompt(3)) == 3 * CHUNK
    async with node(engine, tier=disk(tmp_path)) as b:
        assert await b.bench.found(prompt(3)) == 3 * CHUNK
        await b.sent()
        async with node(engine) as c:
            assert (await c.ask(prompt(3)))[0] == 0


async def test_a_tenant_with_many_deleted_chunks_is_deleted_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 4)
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        for first in range(5):
            await a.share(prompt(1, first))
            await b.ask(prompt(1, first))
            await delete(a, "chunk", prompt(1, first))
        await until_async(lambda: b.stats.chunks == a.stats.chunks == 0, SOON)
        assert len(await tombstones.read_tombstones(a.tier, a.bench.root())) <= 4
        for first in range(9, 30):  # what it reads before it hears of it goes as well
            await b.share(prompt(2, first), deleted=True)
            if (await a.ask(prompt(2, first)))[0] == 2 * CHUNK:
                break
        assert a.stats.chunks == 2


async def test_many_tenants_are_looked_at_when_one_is_deleted() -> None:
    engine = InMemoryBackend()
    salts = [b"%d" % n for n in range(300)]
    async with node(engine) as a, node(engine, arena_bytes=4096 * 4096) as b:
        for salt in salts:
            await b.read(prompt(1), salt=salt)
        await until_async(lambda: len(list(b.remote._epochs)) == 300 or not _looks_again(b), SOON)
        await a.bench.store.delete(a.bench.root(salts[0]), b"")
        await until_async(lambda: len(list(b.remote._epochs)) >= 300, SOON)
        await a.bench.store.delete(a.bench.root(salts[150]), b"")
        await until_async(lambda: b.bench.store.tiers.index.page_of_root(b.bench.root(salts[150]), b"", 1) == [], SOON)
        assert b.stats.chunks >= 298


def _looks_again(b: FleetNode) -> bool:
    return b.remote._tombstones._last_poll is None


def test_garbage_in_the_place_of_marks_deletes_nothing() -> None:
    """Whoever may write there can say that something was deleted; a value that was cut short cannot."""
    notes: dict[bytes, bytes | None] = {}
    marks, root = DeletionEpochs(notes.__setitem__), b"r" * 32
    first = new_epoch(deletion=False)
    assert marks.compare(root, TenantEpochs(None, first, None)) is EpochChange.NONE
    assert marks.compare(root, TenantEpochs(None, b"", None)) is EpochChange.EPOCH_LOST
    assert marks.compare(root, TenantEpochs(None, new_epoch(deletion=True)[:5], None)) is EpochChange.EPOCH_LOST
    assert marks.compare(root, TenantEpochs(None, b"x" * (1 << 20), None)) is EpochChange.EPOCH_LOST
    assert marks.compare(root, TenantEpochs(None, new_epoch(deletion=True), None)) is EpochChange.TENANT_DELETED
    again = DeletionEpochs(notes.__setitem__)
    for name in [b"remote-mark:", b"remote-mark:short", b"remote-mark:" + root]:
        for value in (b"", b"x", b"x" * 47, b"x" * 50):
            again.restore(name, value)
            assert notes.pop(name) is None
    assert list(again) == []


def test_news_behind_other_news_are_heard_as_well() -> None:
    notes: dict[bytes, bytes | None] = {}
    marks, root = DeletionEpochs(notes.__setitem__), b"r" * 32
    marks.compare(root, TenantEpochs(None, new_epoch(deletion=False), None))
    lost = TenantEpochs(None, new_epoch(deletion=False), new_epoch(deletion=True))
    assert [marks.compare(root, lost) for _ in range(3)] == [
        EpochChange.EPOCH_LOST,
        EpochChange.CHUNKS_DELETED,
        EpochChange.NONE,
    ]
    marks.mark_applied(root, marks.observed_at(root))
    everything = TenantEpochs(new_epoch(deletion=True), lost.tenant_epoch, lost.chunks_epoch)
    assert [marks.compare(root, everything) for _ in range(2)] == [EpochChange.ALL_DELETED, EpochChange.NONE]
    marks.mark_applied(b"", marks.observed_at(b""))
    again = DeletionEpochs(notes.__setitem__)
    for name, value in list(notes.items()):
        assert value is not None
        again.restore(name, value)
    assert again.compare(root, everything) is EpochChange.NONE, "all of it was written down"


def test_marks_of_more_tenants_than_are_remembered_say_too_much_and_not_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cache_daemon.remote.deletion_epochs._MAX_TENANTS", 2)
    marks = DeletionEpochs(lambda name, value: None)
    roots = [bytes([n]) * 32 for n in range(4)]
    old = new_epoch(deletion=False)
    marks.compare(roots[0], TenantEpochs(None, old, None))
    assert marks.compare(roots[0], TenantEpochs(None, new_epoch(deletion=True), None)) is EpochChange.TENANT_DELETED
    for root in roots[1:]:
        marks.compare(root, TenantEpochs(None, old, None))
    assert list(marks) == roots[2:]
    assert marks._forgotten_deleted_at > time.monotonic() - SOON


async def test_notes_of_tenants_that_have_nothing_here_go() -> None:
    engine, disk_of_b = InMemoryBackend(), MemoryTier()
    async with node(engine, tier=disk_of_b) as b:
        await b.share(prompt(2), salt=b"stays")
        await b.ask(prompt(2), salt=b"only asked")
        await b.bench.store.settle()
    async with node(engine, tier=disk_of_b) as b:
        await b.bench.store.settle()
    noted = {name for name in disk_of_b.notes() if name.startswith(b"remote-mark:")}
    assert noted == {b"remote-mark:", b"remote-mark:" + b.bench.root(b"stays")}


async def test_a_mark_is_written_down_behind_what_it_says_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sudden end in between does it again; also where the disk fails, and takes little at a time."""
    monkeypatch.setattr("cache_daemon.durable.group_commit_writer._GROUP_REMOVALS", 1)
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await b.share(prompt(6))
        await b.bench.store.settle()
        faulty, name = b.bench.tier, b"remote-mark:" + b.bench.root()
        mark = epoch_digest(engine.values[b.tier.key_schema.tenant_epoch_key(b.bench.root())][0])
        await until_async(lambda: mark in faulty.notes().get(name, b""), SOON)
        before, since = faulty.notes()[name], len(faulty.groups)
        faulty.fail_applies(2)
        await delete(a, "tenant", prompt(6))
        await until_async(lambda: faulty.notes()[name] != before, SOON)
    groups = faulty.groups[since:]
    removed = [n for n, group in enumerate(groups) if group.remove]
    noted = [n for n, group in enumerate(groups) if group.notes.get(name, before) != before]
    assert sum(len(groups[n].remove) for n in removed) == 6
    assert max(removed) <= min(noted)


async def test_a_deletion_is_on_disk_when_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_daemon.store.chunk_deleter._REMOVAL_TIMEOUT_SECONDS", SOON)
    async with node(InMemoryBackend()) as a:
        await a.read(prompt(3))
        await a.bench.store.settle()
        a.bench.tier.hold()
        deleting_it = asyncio.create_task(a.bench.store.delete(a.bench.root(), b""))
        assert await asyncio.to_thread(a.bench.tier.wait_until_held, SOON)
        assert not deleting_it.done()
        a.bench.tier.let_go()
        assert await deleting_it == 3
        assert list(a.bench.tier.inner.load()) == []


async def test_a_deletion_waits_for_a_disk_that_has_much_to_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it goes on: here it takes longer than what a disk that hangs is given."""
    monkeypatch.setattr("cache_daemon.durable.group_commit_writer._GROUP_REMOVALS", 1)
    monkeypatch.setattr("cache_daemon.store.chunk_deleter._REMOVAL_TIMEOUT_SECONDS", 3.0)
    async with node(InMemoryBackend()) as a:
        await a.read(prompt(12))
        await a.bench.store.settle()
        a.bench.tier.slow_seconds = 0.35
        assert await a.bench.store.delete(a.bench.root(), b"") == 12
        assert list(a.bench.tier.inner.load()) == []


async def test_a_deletion_that_the_disk_does_not_take_says_so_until_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_daemon.store.chunk_deleter._REMOVAL_TIMEOUT_SECONDS", 0.2)
    async with opened() as bench:
        key, _ = await bench.put([1, 2])
        await bench.store.settle()
        bench.tier.fail_applies(10_000)
        for _ in range(2):  # the second time there is no such chunk any more
            with pytest.raises(StoreUnavailable, match="has not removed it yet"):
                await bench.store.delete(bench.root(), key)
        assert await bench.found([1, 2]) == 0
        assert len(list(bench.tier.inner.load())) == 1
        monkeypatch.setattr("cache_daemon.store.chunk_deleter._REMOVAL_TIMEOUT_SECONDS", SOON)
        bench.tier._apply_errors.clear()
        with pytest.raises(ChunkNotFound):
            await bench.store.delete(bench.root(), key)
        assert list(bench.tier.inner.load()) == []
        assert await bench.store.delete(bench.root(), b"") == 0, "what has nothing to write waits for nothing"


@pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
@pytest.mark.parametrize("server", ["answers", "hangs"])
def test_daemons_that_are_killed_in_turn_bring_nothing_back(tmp_path: Path, server: str) -> None:
    """Each of two deletes while the other one is down, whose tier may hang when it starts."""
    with ExitStack() as stack:
        fleet = Fleet(stack, tmp_path)
        for down, up in ((0, 1), (1, 0)):
            ids, other = fleet.fresh(), fleet.fresh()
            fleet.read(down, ids)
            fleet.sent(down)
            fleet.nodes[down].settle()
            assert fleet.finds(up, ids, len(ids))
            fleet.nodes[down].kill("daemon")
            fleet.peers[down].close()
            fleet.peers[up].stub.Delete(pb.DeleteRequest(), timeout=20)
            fleet.until(up, lambda stats: stats.remote_deletions == 0)
            fleet.read(up, other)
            fleet.sent(up)
            if server == "hangs":
                fleet.server.send(signal.SIGSTOP)
            fleet.nodes[down].start_daemon()
            fleet.peers[down] = Peer(fleet.nodes[down])
            stack.callback(fleet.peers[down].close)
            if server == "hangs":
                fleet.ask(down, fleet.fresh())
                fleet.server.send(signal.SIGCONT)
            fleet.until(down, lambda stats: not stats.remote_failing and not stats.chunks, SOON)
            assert fleet.ask(down, ids) == fleet.ask(up, ids) == 0
            assert fleet.finds(down, other, len(other)), "what came after it is shared"
