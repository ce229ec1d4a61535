"""Deletions of several nodes that cross, and those of tenants with their first chunk on a node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvsidecar import keys

from benchmarks.condition_wait import until_async
from cache_daemon.remote import tombstone_sync
from cache_daemon.remote.backend import Item, RemoteFailed
from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.remote_record import TenantEpochs, new_epoch
from cache_daemon.store.loss_cause import LossCause
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.remote.nodes import CHUNK, Slow, node, prompt
from tests.cache_daemon.remote.test_tombstone_sync import SOON, delete


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstone_sync, "_POLL_SECONDS", 0.05)


@pytest.mark.parametrize("what", ["tenant", "chunk"])
async def test_a_deletion_is_heard_while_one_of_the_same_tenant_waits_here(what: str) -> None:
    """The mark of the own one takes the place of the other one's."""
    engine, of_b = InMemoryBackend(), Slow()
    of_b.values = engine.values
    async with node(engine) as a, node(of_b) as b:
        await a.share(prompt(3))
        assert (await b.ask(prompt(3)))[0] == 3 * CHUNK
        of_b.fails = True
        await b.bench.store.delete(b.bench.root(), b"")
        await b.read(prompt(3))
        await delete(a, what, prompt(3))
        of_b.fails = False
        await until_async(lambda: b.stats.remote_deletions == b.stats.chunks == 0, SOON)


class Forgetful(InMemoryBackend):
    """A backend that, on command, does the work of a call but loses the answer."""

    loses, lost = False, 0

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        await super().put_many(items, ttl_seconds)
        if self.loses:
            self.lost += 1
            raise RemoteFailed("told to")


async def test_a_deletion_whose_answer_was_lost_is_not_taken_for_another_nodes() -> None:
    engine = Forgetful()
    async with node(engine) as b:
        await b.share(prompt(3))
        engine.loses = True
        await b.bench.store.delete(b.bench.root(), b"")
        await until_async(lambda: engine.lost > 0, SOON)
        await b.read(prompt(3))
        engine.loses = False
        await until_async(lambda: b.stats.remote_deletions == 0 and not b.remote._tombstones._unapplied, SOON)
        assert b.stats.chunks == 3


async def test_a_tenants_marks_are_seen_as_soon_as_it_has_something_here() -> None:
    """A later deletion is news to a node that has never asked the engine for anything of the tenant."""
    engine = InMemoryBackend()
    async with node(engine, write="never") as a, node(engine, write="never") as b:
        await until_async(lambda: b.remote._tombstones._last_poll is not None, SOON)
        await b.read(prompt(3))
        await until_async(lambda: b.bench.root() in b.remote._epochs, SOON)
        await a.bench.store.delete(a.bench.root(), b"")
        await until_async(lambda: b.stats.chunks == b.stats.durable_chunks == 0, SOON)


async def test_tenants_that_have_nothing_here_any_more_do_not_wait_for_the_end_of_an_outage() -> None:
    engine = Slow()
    async with node(engine) as b:
        await until_async(lambda: b.remote._tombstones._last_poll is not None, SOON)
        engine.fails = True
        for salt in (b"stays", b"goes"):
            await b.read(prompt(2), salt)
        assert len(b.remote._tombstones._unseen_tenants) == 2
        chunk = b.bench.store.find(b.bench.root(b"goes"), keys.prefix_hash(b.bench.root(b"goes"), prompt(1)))
        b.bench.store.tiers.remove_subtree(chunk, LossCause.EXPIRED)
        assert list(b.remote._tombstones._unseen_tenants) == [b.bench.root(b"stays")]
        engine.fails = False
        await until_async(lambda: b.bench.root(b"stays") in b.remote._epochs, SOON)


async def test_a_tenants_deletion_is_heard_by_a_node_that_deleted_everything_before() -> None:
    """The record of a tenant without chunks stayed at the time before, and the deletion was taken for an old one."""
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3))
        await a.bench.store.delete(b"", b"")
        await a.sent()
        await until_async(lambda: a.stats.chunks == 0, SOON)
        await a.read(prompt(3))
        await b.bench.store.delete(b.bench.root(), b"")
        await b.sent()
        await until_async(lambda: a.stats.chunks == a.stats.durable_chunks == 0, SOON)


def test_a_deletion_that_the_record_of_a_tenant_has_is_not_news_after_one_of_everything() -> None:
    marks, root = DeletionEpochs(lambda *_: None), b"r" * 32
    first, everything, second = (new_epoch(deletion=True) for _ in range(3))
    marks.compare(root, TenantEpochs(None, new_epoch(deletion=False), None))
    marks.compare(root, TenantEpochs(None, first, None))
    marks.record_own_deletion(b"", everything)
    assert marks.compare(root, TenantEpochs(everything, first, None)) is EpochChange.NONE
    marks.record_own_deletion(b"", new := new_epoch(deletion=True), everything)
    assert marks.compare(root, TenantEpochs(new, second, None)) is EpochChange.TENANT_DELETED
