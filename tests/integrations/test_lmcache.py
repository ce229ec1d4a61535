"""LMCache's objects at a real daemon; with LMCache's own classes under ``make test-lmcache``."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsidecar.integrations.lmcache.l2_object_store import GEOMETRY, TOKEN_BYTES, L2ObjectStore, ObjectName
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import Session
from kvsidecar.net.channel import ServiceAddress

from benchmarks.condition_wait import until
from benchmarks.node import Node
from tests.cache_daemon.conftest import descriptor
from tests.integrations.pools import LMCACHE
from tests.kvsidecar.kv_transfer.test_reuse_metrics import Scraped, daemon

SIZES = [100, 8 * TOKEN_BYTES, 8 * TOKEN_BYTES + 1]
NAMES = [ObjectName(b"", b"%d" % i) for i in range(4)]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="32MiB") as running:
        yield running


def keeper(node: Node, name: str) -> L2ObjectStore:
    link = DaemonConnection(ServiceAddress(node.cache_socket), name, descriptor(name, GEOMETRY))
    assert link.wait(30)
    return L2ObjectStore(link, timeout=20.0)


def object_of(seed: int, size: int) -> memoryview:
    random = torch.Generator().manual_seed(seed)
    return memoryview(torch.randint(0, 256, (size,), generator=random, dtype=torch.uint8).numpy())


def leases(node: Node) -> int:
    return int(node.cache_stats().leases)


def test_objects_of_any_size_come_back(node: Node) -> None:
    one, other = keeper(node, "sizes"), keeper(node, "sizes")
    objects = [object_of(i, size) for i, size in enumerate(SIZES)]
    assert one.store(NAMES[:3], objects).newly_stored == (True, True, True)
    again = other.store(NAMES[:3], objects)
    assert (again.stored, again.newly_stored) == ((True,) * 3, (False,) * 3)
    into = [memoryview(bytearray(size)) for size in [*SIZES, 10]]
    assert other.load(NAMES, into) == [True, True, True, False]
    assert into[:3] == objects
    wrong = memoryview(bytearray(SIZES[2]))
    assert other.load(NAMES[1:2], [wrong]) == [False], "an object of another size is not that object"
    assert wrong == bytes(SIZES[2])
    huge = memoryview(bytearray(TOKEN_BYTES * 4096 + 1))
    assert one.store([NAMES[3], NAMES[3]], [huge, object_of(3, 1)]).stored == (False, True)
    for keeping in (one, other):
        keeping.close()


def test_what_was_copied_while_the_process_hung_is_not_used(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon may have ended the session, and given the pages to others."""
    one = keeper(node, "hung")
    one.store(NAMES[:1], [object_of(0, 50)])
    copied = L2ObjectStore._copied

    def slow(self: L2ObjectStore, *arguments: Any) -> Any:
        found = list(copied(self, *arguments))
        session = one._connection.session
        assert session is not None
        session.record_ack = lambda _: None  # type: ignore[method-assign]
        session.last_acked_at = time.monotonic() - 2.1 * session.heartbeat_seconds
        return found

    monkeypatch.setattr(L2ObjectStore, "_copied", slow)
    assert one.load(NAMES[:1], [memoryview(bytearray(50))]) == [False]
    monkeypatch.setattr(L2ObjectStore, "_copied", copied)
    assert one._connection.wait(30)
    assert one.load(NAMES[:1], [memoryview(bytearray(50))]) == [True]
    one.close()


def test_locks_are_leases(node: Node) -> None:
    one = keeper(node, "locks")
    one.store(NAMES[:2], [object_of(0, 50), object_of(1, 50)])
    assert one.lock(NAMES[:3], [50] * 3) == [True, True, False]
    assert one.lock(NAMES[:1], [50]) == [True]
    assert leases(node) > 0
    one.unlock(NAMES[:3])  # one lock is left, on the first
    into = memoryview(bytearray(50))
    assert one.delete(NAMES[:1], [50]) == [True]
    assert one.load(NAMES[:1], [into]) == [True], "what is locked is there, whatever becomes of it"
    assert into == object_of(0, 50)
    one.unlock(NAMES[:1])
    one.unlock(NAMES[:1])
    until(lambda: not leases(node))  # releases are not waited for
    assert one.load(NAMES[:1], [into]) == [False]
    one.close()


@pytest.mark.parametrize(("count", "size"), [(298, 128 << 20), (4100, 50)])
@pytest.mark.parametrize("possible", [False, True])
def test_a_lookup_of_more_than_a_match_may_ask_for(
    node: Node, monkeypatch: pytest.MonkeyPatch, count: int, size: int, possible: bool
) -> None:
    """A long prompt of a large model. ``possible``: the index summary excludes nothing."""
    if possible:
        monkeypatch.setattr(Session, "may_contain_content", lambda self, root, ids: True)
    one = keeper(node, "long")
    one.store(NAMES[:2], [object_of(0, 50), object_of(1, 50)])
    names = [NAMES[0], *(ObjectName(b"", b"absent %d" % i) for i in range(count)), NAMES[1]]
    session = one._connection.session
    assert one.lock(names, [50, *[size] * count, 50]) == [True, *[False] * count, True]
    assert one._connection.session is session, "the leases of other lookups live on"
    one.unlock(names)
    until(lambda: not leases(node))
    one.close()


def test_loads_are_in_the_daemons_metrics(tmp_path: Path) -> None:
    """A load counts when its lease ends: that of the lock, or of the load itself. Tokens are units of 32 KiB."""
    with daemon(tmp_path, 0) as (node, port):
        link = DaemonConnection(
            ServiceAddress(node.cache_socket), "counted", descriptor("counted", GEOMETRY), engine="lmcache"
        )
        assert link.wait(30)
        store, sizes = L2ObjectStore(link, timeout=20.0), [100, 8 * TOKEN_BYTES, 9 * TOKEN_BYTES]
        into = [memoryview(bytearray(size)) for size in sizes]
        try:
            assert store.store(NAMES[:3], [object_of(i, size) for i, size in enumerate(sizes)]).stored == (True,) * 3
            assert store.lock(NAMES[:2], sizes[:2]) == [True, True]
            for _ in range(2):
                assert store.load(NAMES[1:2], into[1:2]) == [True]
            assert Scraped(port, link.namespace)("loads", "", engine="lmcache") == 0, "the lease has not ended"
            store.unlock(NAMES[:2])
            assert store.load(NAMES[1:], [*into[1:], memoryview(bytearray(5))]) == [True, True, False]
            assert store.lock(NAMES[:1], sizes[:1]) == [True]
            store.unlock(NAMES[:1])  # found, and not loaded
            until(lambda: not leases(node))
            until(lambda: Scraped(port, link.namespace)("loads", "", engine="lmcache") >= 2)
            found = Scraped(port, link.namespace)
        finally:
            store.close()
        assert found("loads", "", engine="lmcache") == 2
        assert found("loaded_tokens", "", engine="lmcache") == 8 + (8 + 9)
        assert found("loaded_bytes", "", engine="lmcache") == (8 + (8 + 9)) * TOKEN_BYTES
        assert 0 < found("load_seconds", "", engine="lmcache") < 20


def test_tenants_share_nothing(node: Node) -> None:
    one = keeper(node, "tenants")
    theirs = ObjectName(b"salt", NAMES[0].name)
    assert one.store([NAMES[0], theirs], [object_of(0, 20), object_of(1, 20)]).stored == (True, True)
    into = [memoryview(bytearray(20)) for _ in range(2)]
    assert one.load([theirs, NAMES[0]], into) == [True, True]
    assert into == [object_of(1, 20), object_of(0, 20)]
    assert one.lock([ObjectName(b"other", NAMES[0].name)], [20]) == [False]
    one.close()


def test_a_dead_daemon_costs_misses_and_its_objects_outlive_it() -> None:
    with Node(workers=0, arena_bytes="8MiB") as node:
        one = keeper(node, "mortal")
        one.store(NAMES[:1], [object_of(0, 30)])
        node.settle()
        assert one.lock(NAMES[:1], [30]) == [True]
        node.kill("daemon")
        until(lambda: not one.attached)  # before, what is under lock is there still: its memory is mapped
        into = memoryview(bytearray(30))
        assert one.load(NAMES[:1], [into]) == [False]
        assert one.lock(NAMES[:1], [30]) == [False]
        assert one.store(NAMES[1:2], [object_of(1, 30)]).stored == (False,)
        assert one.delete(NAMES[:1], [30]) == [False]
        node.start_daemon()
        assert one._connection.wait(20)
        assert one.load(NAMES[:1], [into]) == [True], "its lock is of another session, and it is found anew"
        assert into == object_of(0, 30)
        one.unlock(NAMES[:1])
        one.close()


# ---- LMCache's own classes ----------------------------------------------------------------------------------


def adapter(node: Node, socket: Path | None = None) -> Any:
    """The adapter as LMCache makes it from its flag."""
    if LMCACHE not in sys.path:
        sys.path.append(LMCACHE)
    from lmcache.v1.distributed.l2_adapters import plugin_l2_adapter

    config = plugin_l2_adapter.PluginL2AdapterConfig.from_dict(
        {
            "type": "plugin",
            "module_path": "kvsidecar.integrations.lmcache",
            "class_name": "KVSidecarL2Adapter",
            "adapter_params": {"socket": str(socket or node.cache_socket), "timeout_ms": 5000},
        }
    )
    made = plugin_l2_adapter._create_plugin_adapter(config)
    made.set_backend_identity("plugin")
    return made


def key(seed: int, salt: str = "", rank: int = 0) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=bytes([seed]) * 32, model_name="org/model", kv_rank=rank, cache_salt=salt)


def memory(seed: int | None) -> Any:
    """A memory object of LMCache's, random or empty."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    shape = torch.Size([2, 3, 16, 32])
    data = torch.zeros(shape.numel() * 2, dtype=torch.uint8)
    if seed is not None:
        data.random_(generator=torch.Generator().manual_seed(seed))
    metadata = MemoryObjMetadata(shape, torch.bfloat16, 0, len(data), 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(data, metadata, None)


def layouts() -> dict[int, Any]:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return {0: MemoryLayoutDesc([torch.Size([2, 3, 16, 32])], [torch.bfloat16])}


def awaited(descriptor: int, result: Any) -> Any:
    """Return the result once the event descriptor is readable."""
    assert select.select([descriptor], [], [], 20)[0], "no event within 20 s"
    from lmcache.v1.platform import consume_fd

    consume_fd(descriptor)
    return result()


@pytest.mark.lmcache
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lmcache_loads_it_by_its_flag_and_its_objects_come_back(node: Node) -> None:
    one = adapter(node)
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    assert isinstance(one, L2AdapterInterface)
    events = [one.get_store_event_fd(), one.get_lookup_and_lock_event_fd(), one.get_load_event_fd()]
    assert len(set(events)) == 3
    assert one._objects._connection.wait(30)
    named = [key(1), key(2), key(1, salt="a"), key(1, rank=7)]
    task = one.submit_store_task(named[:3], [memory(1), memory(2), memory(3)])
    result = awaited(events[0], one.pop_completed_store_tasks)[task]
    assert (result.is_successful(), result.bytes_transferred()) == (True, 3 * memory(1).get_size())
    assert one.pop_completed_store_tasks() == {}
    assert one.get_usage().bytes_by_cache_salt == {"": 2 * memory(1).get_size(), "a": memory(1).get_size()}

    restarted = adapter(node)  # knows no sizes but what LMCache says
    assert restarted._objects._connection.wait(30)
    task = restarted.submit_lookup_and_lock_task(named, layouts())
    found = awaited(restarted.get_lookup_and_lock_event_fd(), lambda: restarted.query_lookup_and_lock_result(task))
    assert [found.test(i) for i in range(4)] == [True, True, True, False]
    assert restarted.query_lookup_and_lock_result(task) is None
    objects = [memory(None) for _ in named]
    task = restarted.submit_load_task(named, objects)
    done = awaited(restarted.get_load_event_fd(), lambda: restarted.query_load_result(task))
    assert [done.test(i) for i in range(4)] == [True, True, True, False]
    assert [torch.equal(o.raw_data, memory(s).raw_data) for o, s in zip(objects, (1, 2, 3), strict=False)] == [True] * 3
    restarted.submit_unlock(named)
    restarted.delete(named[:1])
    task = one.submit_lookup_and_lock_task(named[:2], {})
    found = awaited(events[1], lambda: one.query_lookup_and_lock_result(task))
    assert [found.test(i) for i in range(2)] == [False, True]
    one.submit_unlock(named[:2])
    assert one.report_status()["is_healthy"]
    for made in (one, restarted):
        made.close()


@pytest.mark.lmcache
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lmcache_starts_without_a_daemon(node: Node, tmp_path: Path) -> None:
    one = adapter(node, tmp_path / "none.sock")
    task = one.submit_store_task([key(1)], [memory(1)])
    assert not awaited(one.get_store_event_fd(), one.pop_completed_store_tasks)[task].is_successful()
    task = one.submit_lookup_and_lock_task([key(1)], layouts())
    found = awaited(one.get_lookup_and_lock_event_fd(), lambda: one.query_lookup_and_lock_result(task))
    assert not found.test(0)
    assert not one.report_status()["is_healthy"]
    one.close()


@pytest.mark.lmcache
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_task_whose_work_raises_ends_as_a_failure(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache waits for the result of each task; a task without one kept its memory locked for good."""
    one = adapter(node)
    monkeypatch.setattr(one, "_views", raising(BufferError("the memory is gone")))
    monkeypatch.setattr(one._objects, "lock", raising(OSError("no descriptor")))
    task = one.submit_store_task([key(1)], [memory(1)])
    stored = awaited(one.get_store_event_fd(), one.pop_completed_store_tasks)[task]
    assert (stored.is_successful(), stored.bytes_transferred()) == (False, 0)
    task = one.submit_lookup_and_lock_task([key(1)], layouts())
    assert not awaited(one.get_lookup_and_lock_event_fd(), lambda: one.query_lookup_and_lock_result(task)).test(0)
    task = one.submit_load_task([key(1)], [memory(None)])
    assert not awaited(one.get_load_event_fd(), lambda: one.query_load_result(task)).test(0)
    one.close()
    assert [record.message for record in caplog.records].count("an L2 task failed") == 3


def raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: Any) -> Any:
        raise error

    return raise_it
