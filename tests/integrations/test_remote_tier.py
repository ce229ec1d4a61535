"""Other engines on two nodes with one remote tier: what one has stored, the other finds. All of it is real."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kvsidecar.integrations.lmcache.l2_object_store import GEOMETRY, TOKEN_BYTES, L2ObjectStore, ObjectName
from kvsidecar.integrations.sglang.host_pool_layout import host_pool_cache
from kvsidecar.integrations.sglang.page_store import PageStore
from kvsidecar.integrations.vllm.prefill_rate import PrefillRate
from kvsidecar.kv_transfer.block_chunking import BlockChunking
from kvsidecar.kv_transfer.block_copier import slots_of
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

from benchmarks.condition_wait import until
from benchmarks.node import Node
from benchmarks.remote_servers import RedisServer, why_no_valkey
from tests.cache_daemon.conftest import descriptor
from tests.integrations.connector_pair import Request, Status, Vllm
from tests.integrations.pools import MHATokenToKVPoolHost
from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS, fill

pytestmark = pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())

CHUNK = 2 * BLOCK_TOKENS  # as many tokens as are worth asking a remote tier for


@dataclass
class Nodes:
    """Two daemons with one remote tier, to which both write at the first use."""

    one: Node
    two: Node

    def sent(self) -> None:
        """Wait until the chunks of the first daemon are in the tier."""
        until(
            lambda: self.one.cache_stats().remote_written_chunks > 0 and self.one.cache_stats().remote_pending == 0, 20
        )

    def no_lease(self) -> None:
        for node in (self.one, self.two):
            until(lambda node=node: not node.cache_stats().leases, 20)  # type: ignore[misc]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(tmp_path / "redis"))
        flags = {"heartbeat_ms": 5000, "remote": server.url, "remote_write": "all"}
        one, two = (stack.enter_context(Node(workers=0, arena_bytes="32MiB", daemon_flags=flags)) for _ in range(2))
        for node in (one, two):
            until(lambda node=node: not node.cache_stats().remote_failing, 20)  # type: ignore[misc]
        yield Nodes(one, two)


@pytest.fixture
def engines() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def vllm(stack: ExitStack, node: Node) -> Vllm:
    found = Vllm(node, "remote", chunk_tokens=CHUNK)
    found.scheduler._prefill_rate.record(100, 100.0)  # dear enough that everything is worth bringing
    stack.callback(found.close)
    return found


def turn(engine: Vllm, name: str, tokens: list[int], blocks: list[int], stored: int = 0) -> int:
    """Serves a prompt to its end. Returns how many of its tokens came from the daemon.

    As long as fewer than ``stored`` are found, another request asks: a lookup that a busy machine delays gives up.
    """
    deadline, tries = time.monotonic() + 20, 0
    while (found := engine.matched(request := Request(name if not tries else f"{name}{tries}", tokens))[0]) < stored:
        assert time.monotonic() < deadline, f"{found} of {stored}"
        engine.allocated(request, [], 0)  # its lease
        tries += 1
    if found:
        engine.allocated(request, blocks, found)
        engine.step()
        engine.wait(set(), {request.request_id})
        assert engine.workers[0].get_block_ids_with_load_errors() == set()
        request.num_computed_tokens = found
    engine.allocated(request, blocks, 0)
    left = request.num_tokens - request.num_computed_tokens
    engine.step({request.request_id: (request, left, blocks)})
    request.status = Status.FINISHED_STOPPED
    if engine.scheduler.request_finished(request, blocks):
        engine.step()
        engine.wait({request.request_id}, set())
    return found


def test_what_a_vllm_of_another_node_read_is_found_to_the_last_whole_block(nodes: Nodes, engines: ExitStack) -> None:
    one, two = vllm(engines, nodes.one), vllm(engines, nodes.two)
    ids = list(range(700, 700 + 3 * BLOCK_TOKENS + 5))
    fill(one.writes[0], torch.from_numpy(slots_of([0, 1, 2, 3], BLOCK_TOKENS)), torch.bfloat16)
    assert turn(one, "a", ids, [0, 1, 2, 3]) == 0
    nodes.sent()
    assert turn(two, "b", ids, [4, 2, 0, 3], 3 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    assert two.payload(0, [4, 2, 0]) == one.payload(0, [0, 1, 2])
    assert nodes.two.cache_stats().remote_tokens == 3 * BLOCK_TOKENS
    nodes.no_lease()


def test_behind_a_turn_that_ended_within_a_chunk_prompts_are_cut_as_anywhere(nodes: Nodes, engines: ExitStack) -> None:
    """One conversation in two turns, of which another node hears only the second."""
    one, two = vllm(engines, nodes.one), vllm(engines, nodes.two)
    ids = list(range(900, 900 + 5 * BLOCK_TOKENS))
    assert turn(one, "a", ids[: 3 * BLOCK_TOKENS], [0, 1, 2]) == 0
    until(lambda: nodes.one.cache_stats().chunks == 2, 20)
    assert turn(one, "b", ids, [0, 1, 2, 3, 4]) == 3 * BLOCK_TOKENS
    until(lambda: nodes.one.cache_stats().chunks == 3, 20)
    nodes.sent()
    assert turn(two, "c", ids, [4, 2, 0, 3, 1], 5 * BLOCK_TOKENS) == 5 * BLOCK_TOKENS


def sglang(stack: ExitStack, node: Node, pool: MHATokenToKVPoolHost) -> PageStore:
    cache = host_pool_cache(pool, 16)
    link = DaemonConnection(ServiceAddress(node.cache_socket), "pages", descriptor("pages", cache.geometry))
    stack.callback(link.close)
    assert link.wait(30)
    return PageStore(cache, link, timeout=20.0)


def test_pages_that_an_sglang_of_another_node_stored_are_found(nodes: Nodes, engines: ExitStack) -> None:
    """Its pages have no tokens that could be cut: each is asked for by its name."""
    ours, theirs = (MHATokenToKVPoolHost(layout, page_size=CHUNK) for layout in ("layer_first", "page_first"))
    one, two = sglang(engines, nodes.one, ours), sglang(engines, nodes.two, theirs)
    names = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(40)]
    ours.kv_buffer.copy_(torch.randn(ours.kv_buffer.shape, generator=torch.Generator().manual_seed(3)))
    assert one.store(names[:3], slots_of([4, 1, 2], CHUNK)) == [True] * 3
    nodes.sent()
    until(lambda: two.exists(names) == 3, 20)  # a lookup that a busy machine delays gives up
    assert two.load(names[:3], slots_of([0, 3, 5], CHUNK)) == [True] * 3
    for here, there in ((4, 0), (1, 3), (2, 5)):
        assert torch.equal(ours.rows(here), theirs.rows(there))
    assert two.exists(names[20:]) == 0
    nodes.no_lease()


def test_objects_that_an_lmcache_of_another_node_stored_are_found_and_deleted(nodes: Nodes, engines: ExitStack) -> None:
    both = (nodes.one, nodes.two)
    links = [
        DaemonConnection(ServiceAddress(node.cache_socket), "objects", descriptor("objects", GEOMETRY)) for node in both
    ]
    for link in links:
        engines.callback(link.close)
        assert link.wait(30)
    one, two = (L2ObjectStore(link, timeout=20.0) for link in links)
    size = 16 * TOKEN_BYTES - 3
    names, objects = (
        [ObjectName(b"salt", b"%d" % i) for i in range(3)],
        [memoryview(bytes([i]) * size) for i in range(2)],
    )
    assert one.store(names[:2], objects).stored == (True, True)
    nodes.sent()

    def locked() -> bool:
        found = two.lock(names, [size] * 3)
        if found != [True, True, False]:
            two.unlock([name for name, there in zip(names, found, strict=True) if there])
        return found == [True, True, False]

    until(locked, 20)  # a lookup that a busy machine delays gives up
    into = [memoryview(bytearray(size)) for _ in names]
    assert two.load(names, into) == [True, True, False]
    assert into[:2] == objects
    two.unlock(names[:2])
    session = links[1].session
    assert two.lock(names[2:], [TOKEN_BYTES * 4097]) == [False], "it is larger than a chunk may be"
    assert links[1].session is session, "nothing was asked that is refused"
    nodes.no_lease()
    assert two.delete(names[:1], [size]) == [True]
    until(lambda: nodes.two.cache_stats().remote_deletions == 0, 20)
    assert two.load(names[:2], into[:2]) == [False, True]


def test_cuts_are_where_chunks_are_stored() -> None:
    chunking = BlockChunking.of_blocks(20, 8)
    assert (chunking.chunk_tokens, chunking.boundaries(0, 60, 4096), chunking.boundaries(32, 60, 4096)) == (
        24,
        [24, 48, 56],
        [48, 56],
    )
    assert (
        chunking.shared_boundaries(7, 4096),
        chunking.shared_boundaries(8, 4096),
        chunking.boundaries(56, 59, 4096),
    ) == ([], [8], [])
    assert len(BlockChunking(1).shared_boundaries(1 << 20, 4096)) == 8192, "no look-up may have more"


def test_what_computing_takes_follows_what_was_computed_and_is_always_a_number_of_seconds() -> None:
    rate = PrefillRate()
    rate.record(10, 5.0)
    assert rate.seconds_per_token == 0, "a few tokens say nothing"
    rate.record(100, 5.0)
    rate.record(100, 10.0)
    assert 0.05 < rate.seconds_per_token < 0.1
    rate.record(32, 1e9)
    assert rate.seconds_per_token < 3600, "the daemon takes no more"
