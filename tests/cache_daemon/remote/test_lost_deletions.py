"""Deletions that a backend loses: by a failover, a restored backup, a restart without its data."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest
from kvsidecar import keys

from benchmarks.condition_wait import until_async
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.remote import deletion_epochs as store_marks
from cache_daemon.remote import tombstone_sync
from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.remote_record import TenantEpochs, new_epoch
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.remote.nodes import CHUNK, FleetNode, node, prompt

SOON = 60.0
SALT = b"customer"
IDS = prompt(4)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstone_sync, "_POLL_SECONDS", 0.05)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_marks, "GRACE_SECONDS", 0.0)


def deletion_of(a: FleetNode, what: str) -> tuple[bytes, bytes]:
    """Build the request of Delete."""
    root = a.bench.root(SALT)
    first = keys.prefix_hash(root, IDS[:CHUNK])
    return (b"" if what == "everything" else root), (first if what == "chunk" else b"")


async def delete(a: FleetNode, what: str) -> None:
    await a.bench.store.delete(*deletion_of(a, what))
    await until_async(lambda: a.stats.remote_deletions == 0, SOON)


def fail_over(engine: InMemoryBackend, values: dict[str, tuple[bytes, float | None]], *nodes: FleetNode) -> None:
    """Restore an earlier state of the backend; the named nodes notice a reconnect."""
    engine.values = copy.deepcopy(values)
    for one in nodes:
        one.tier.backend_generation += 1


def heads(engine: InMemoryBackend) -> int:
    return sum(name.endswith("/head") for name in engine.values)


@pytest.mark.parametrize("what", ["tenant", "chunk", "everything"])
async def test_a_failover_brings_no_deleted_chunk_back(what: str) -> None:
    """Neither to the node that deleted it nor to the others, and to none that comes later."""
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(IDS, SALT)
        assert (await b.ask(IDS, SALT))[0] == len(IDS)
        before = copy.deepcopy(engine.values)
        await delete(a, what)
        await until_async(lambda: b.stats.chunks == 0, SOON)
        fail_over(engine, before)
        if what != "chunk":
            assert (await a.ask(IDS, SALT))[0] == 0, "who knows of the deletion does not wait for that"
        await until_async(lambda: a.stats.remote_restored_deletions + b.stats.remote_restored_deletions > 0, SOON)
        await a.sent()
        assert (await a.ask(IDS, SALT))[0] == (await b.ask(IDS, SALT))[0] == 0
        async with node(engine) as c:
            assert (await c.ask(IDS, SALT))[0] == 0


@pytest.mark.parametrize("what", ["tenant", "chunk", "everything"])
async def test_a_deletion_is_remembered_over_a_restart(what: str, tmp_path: Path) -> None:
    engine = InMemoryBackend()
    async with node(engine, tier=LmdbTier(tmp_path / "a", 1 << 20)) as a:
        await a.share(IDS, SALT)
        before = copy.deepcopy(engine.values)
        await delete(a, what)
        await a.bench.store.settle()
    fail_over(engine, before)
    async with node(engine, tier=LmdbTier(tmp_path / "a", 1 << 20)) as a:
        await until_async(lambda: a.stats.remote_restored_deletions > 0, SOON)
        await a.sent()
        async with node(engine) as b:
            assert (await b.ask(IDS, SALT))[0] == 0


@pytest.mark.parametrize("what", ["tenant", "chunk", "everything"])
async def test_a_node_that_was_down_hears_of_a_deletion_that_the_engine_lost(what: str, tmp_path: Path) -> None:
    """The engine restarts without its data before the node is back, which has the deleted chunks on its disk."""
    engine = InMemoryBackend()
    async with node(engine, tier=LmdbTier(tmp_path / "b", 1 << 20)) as b:
        await b.share(IDS, SALT)
        await b.bench.store.settle()
    async with node(engine) as a:
        assert (await a.ask(IDS, SALT))[0] == len(IDS)
        await delete(a, what)
        engine.values.clear()
        await until_async(lambda: a.stats.remote_restored_deletions > 0, SOON)
        async with node(engine, tier=LmdbTier(tmp_path / "b", 1 << 20)) as b:
            await until_async(lambda: b.stats.chunks == 0, SOON)
            assert await b.bench.found(IDS, salt=SALT) == 0


async def test_a_node_that_did_a_deletion_keeps_what_came_after_it() -> None:
    """The mark that comes back is the one that it knows."""
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(IDS, SALT)
        await b.ask(IDS, SALT)
        before = copy.deepcopy(engine.values)
        await delete(a, "tenant")
        await until_async(lambda: b.stats.chunks == 0, SOON)
        await a.share(prompt(3, 7), SALT)
        await b.share(prompt(3, 8), SALT)
        fail_over(engine, before, a, b)
        await until_async(lambda: a.stats.remote_restored_deletions + b.stats.remote_restored_deletions > 0, SOON)
        assert await a.bench.found(prompt(3, 7), salt=SALT) == 3 * CHUNK
        assert await b.bench.found(prompt(3, 8), salt=SALT) == 3 * CHUNK
        async with asyncio.timeout(SOON):  # offered again at one of its next uses
            while (await b.ask(prompt(3, 7), SALT))[0] != 3 * CHUNK:
                await a.bench.found(prompt(3, 7), salt=SALT)
                await a.sent()


async def test_a_new_deletion_that_cannot_be_written_is_tried_again_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that finds its deletion lost again writes a new one, and each attempt would make another."""
    made: list[bytes] = []
    engine, attempts = InMemoryBackend(), 0

    def counted(*, deletion: bool) -> bytes:
        made.append(new_epoch(deletion=deletion))
        return made[-1]

    monkeypatch.setattr(tombstone_sync, "new_epoch", counted)
    async with node(engine) as a:
        await a.share(IDS, SALT)
        await delete(a, "tenant")
        engine.values.clear()
        await until_async(lambda: a.stats.remote_restored_deletions == 1, SOON)
        assert not made

        async def refused(*_: object) -> None:
            nonlocal attempts
            attempts += bool(made)
            raise RemoteFailed("the disk of the server is full")

        monkeypatch.setattr(engine, "put_many", refused)
        engine.values.clear()
        await until_async(lambda: attempts >= 3, SOON)
        monkeypatch.undo()
        await until_async(lambda: a.stats.remote_restored_deletions == 2, SOON)
        assert len(made) == 1
        assert made[0] in {value for value, _ in engine.values.values()}


def test_nodes_that_disagree_which_deletion_is_later_end_by_a_new_one() -> None:
    """Each knows the other's mark as an earlier one; a mark that neither knows is believed by both."""
    root = b"r" * 32
    first, second, third = (new_epoch(deletion=True) for _ in range(3))
    one, other = DeletionEpochs(lambda *_: None), DeletionEpochs(lambda *_: None)
    for marks, order in ((one, (first, second)), (other, (second, first))):
        for mark in order:
            marks.compare(root, TenantEpochs(None, mark, None))
    assert (
        one.compare(root, TenantEpochs(None, first, None))
        is other.compare(root, TenantEpochs(None, second, None))
        is EpochChange.DELETION_LOST
    )
    assert one.lost_deletions(root, TenantEpochs(None, first, None)) == {root: second}
    assert (
        one.compare(root, TenantEpochs(None, third, None))
        is other.compare(root, TenantEpochs(None, third, None))
        is EpochChange.TENANT_DELETED
    )


def test_notes_of_marks_survive_a_restart() -> None:
    notes: dict[bytes, bytes | None] = {}
    root, plain = b"r" * 32, new_epoch(deletion=False)
    everything, tenant = new_epoch(deletion=True), new_epoch(deletion=True)
    marks = DeletionEpochs(notes.__setitem__)
    marks.compare(root, TenantEpochs(None, plain, None))
    marks.record_own_deletion(b"", everything, None)
    marks.compare(root, TenantEpochs(everything, plain, None))
    marks.record_own_deletion(root, tenant, plain)
    chunks = new_epoch(deletion=True)
    marks.compare(root, TenantEpochs(everything, tenant, chunks))
    marks.record_tombstones(root, {b"h" * 32 + b"i" * 8})
    marks.mark_applied(root, marks.observed_at(root))
    again = DeletionEpochs(notes.__setitem__)
    for name, value in list(notes.items()):
        assert value is not None
        again.restore(name, value)
    assert again.compare(root, TenantEpochs(everything, tenant, chunks)) is EpochChange.NONE
    assert again.compare(root, TenantEpochs(everything, tenant, None)) is EpochChange.DELETION_LOST
    assert again.compare(root, TenantEpochs(everything, plain, None)) is EpochChange.DELETION_LOST
    assert again.compare(root, TenantEpochs(None, plain, None)) is EpochChange.DELETION_LOST
    assert again.lost_deletions(root, TenantEpochs(None, plain, None)) == {b"": everything, root: tenant}
    assert again.missing_tombstones(root, set()) == {b"h" * 32 + b"i" * 8}
    again.forget(root)
    assert again.tenants_with_deletions() == [root], "of whom a deletion is known is not forgotten"


@pytest.mark.usefixtures("no_grace")
async def test_an_engine_that_restarts_empty_is_filled_by_use() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a:
        await a.share(IDS)
        assert heads(engine) == 4
        fail_over(engine, {}, a)
        for _ in range(3):
            await a.ask(IDS)
            await a.sent()
        assert heads(engine) == 4
        async with node(engine) as b:
            assert (await b.ask(IDS))[0] == len(IDS)


async def test_an_engine_that_restarts_empty_is_filled_by_command_at_once() -> None:
    """While the nodes' own use of a chunk does not offer it yet, which is counted."""
    engine = InMemoryBackend()
    async with node(engine) as a:
        await a.share(IDS)
        fail_over(engine, {}, a)
        for _ in range(3):
            await a.ask(IDS)
            await a.sent()
        assert heads(engine) == 0
        assert a.stats.remote_withheld >= 4
        chunks = [chunk async for chunk in a.bench.store.listing.iter_chunks(a.bench.root())]
        async for carried in a.remote.transfer.push(chunks):
            last = carried
        assert (last.chunks, last.lost, heads(engine)) == (4, 0, 4)
        assert a.bench.store.stats().remote_dropped <= 4
