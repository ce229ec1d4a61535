"""Both halves of the vLLM connector over a real daemon, told by hand what vLLM's scheduler tells them."""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvsidecar.integrations.vllm.messages import Step
from kvsidecar.integrations.vllm.salts import Unidentified, cacheable_tokens, salt_of
from kvsidecar.integrations.vllm.scheduling import SchedulerHalf
from kvsidecar.integrations.vllm.settings import Settings
from kvsidecar.integrations.vllm.working import WorkerHalf
from kvsidecar.layout import Geometry, new_header
from kvsidecar.paged.copying import BlockCopier, slots_of
from kvsidecar.paged.link import DaemonLink
from kvsidecar.runtime import socket_target

from benchmarks.node import Node
from tests.cache_daemon.conftest import descriptor
from tests.kvsidecar.paged.caches import BLOCK_TOKENS, apart, fill, geometry, packed

PROMPT = list(range(500, 500 + 4 * BLOCK_TOKENS + 3))
WHOLE = 4 * BLOCK_TOKENS


class Status(enum.Enum):
    """The names of vLLM's."""

    RUNNING = 1
    FINISHED_STOPPED = 2
    FINISHED_ABORTED = 3
    FINISHED_ERROR = 4


@dataclass
class Request:
    """What is used of vLLM's ``Request``."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    status: Status = Status.RUNNING

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens

    def is_finished(self) -> bool:
        return self.status is not Status.RUNNING


class Vllm:
    """One scheduler and its ranks."""

    def __init__(self, node: Node, name: str, *, ranks: int = 1, transposed: bool = False) -> None:
        settings = Settings(str(node.cache_socket), chunk_tokens=BLOCK_TOKENS, timeout_ms=5000, least_tokens=1)
        self.scheduler = SchedulerHalf(settings, BLOCK_TOKENS)
        self.caches, self.workers, self.writes = [], list[WorkerHalf](), []
        for rank in range(ranks):
            cache, write = apart("bhct") if transposed else packed()
            described = descriptor(name, geometry(torch.bfloat16))
            described.tensor_parallel_rank, described.tensor_parallel_size = rank, ranks
            link = DaemonLink(socket_target(node.cache_socket), f"{name}-{rank}", described)
            assert link.wait(10)
            self.caches.append(cache)
            self.writes.append(write)
            self.workers.append(WorkerHalf(settings, cache, link, rank, BLOCK_TOKENS))
        self.scheduler.introduce({i: w.introduction() for i, w in enumerate(self.workers)})
        self.links = [rank.link for rank in self.scheduler._ranks]
        assert all(link.wait(10) for link in self.links)

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def matched(self, request: Request, local: int = 0) -> tuple[int, bool]:
        deadline = time.monotonic() + 10
        while True:
            tokens, later = self.scheduler.matched(request, local)
            if tokens is not None:
                return tokens, later
            assert time.monotonic() < deadline

    def allocated(self, request: Request, blocks: list[int], external: int) -> None:
        self.scheduler.allocated(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), external)

    def step(
        self, scheduled: dict[str, tuple[Request, int, list[int]]] | None = None, preempted: tuple[str, ...] = ()
    ) -> Step:
        """Schedules so many tokens of requests in blocks, and tells the workers."""
        given = scheduled or {}
        output = SimpleNamespace(
            preempted_req_ids=set(preempted),
            num_scheduled_tokens={name: tokens for name, (_, tokens, _) in given.items()},
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda name: (given[name][2],)),
        )
        step = self.scheduler.order(output)
        for request, tokens, _ in given.values():
            request.num_computed_tokens += tokens
        for worker in self.workers:
            worker.preempted(step)
            worker.load(step)
            worker.store(step)
        return step

    def wait(self, sent: set[str], received: set[str]) -> None:
        """Until all ranks have said so."""
        for worker in self.workers:
            gone, came = set[str](), set[str]()
            deadline = time.monotonic() + 10
            while not (gone >= sent and came >= received):
                assert time.monotonic() < deadline, f"sent {gone}, received {came}"
                more = worker.done()
                gone, came = gone | more[0], came | more[1]
                time.sleep(0.002)
            assert (gone, came) == (sent, received)
        self.scheduler.received(received)

    def compute(self, request: Request, blocks: list[int]) -> None:
        """Prefills the whole request in one step, and ends it."""
        self.allocated(request, blocks, 0)
        for i, write in enumerate(self.writes):
            fill(write, torch.from_numpy(slots_of(blocks, BLOCK_TOKENS)), torch.bfloat16, seed=i)
        self.step({request.request_id: (request, request.num_tokens, blocks)})
        request.status = Status.FINISHED_STOPPED
        if self.scheduler.finished(request, blocks):
            self.step()
            self.wait({request.request_id}, set())

    def payload(self, rank: int, blocks: list[int]) -> bytes:
        g = self.caches[rank].geometry
        header = new_header(Geometry(g.layers, g.kv_heads, g.head_dim, g.dtype, 16), [0] * len(blocks) * 8, 0)
        out = memoryview(bytearray(header.payload_bytes))
        BlockCopier(self.caches[rank]).pack(slots_of(blocks, BLOCK_TOKENS), header, out)
        return bytes(out)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="8MiB", daemon_flags={"heartbeat_ms": 1000}) as running:
        yield running


@pytest.fixture
def engines() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, node: Node, name: str, **options: Any) -> Vllm:
    found = Vllm(node, name, **options)
    stack.callback(found.close)
    return found


def test_a_prompt_that_one_engine_computed_another_loads(node: Node, engines: ExitStack) -> None:
    one, two = start(engines, node, "pair"), start(engines, node, "pair", transposed=True)
    first = Request("a", PROMPT)
    assert one.matched(first) == (0, False)
    one.compute(first, [0, 1, 2, 3, 4])
    again = Request("b", PROMPT)
    assert two.matched(again) == (WHOLE, True)
    two.allocated(again, [4, 2, 0, 3, 1], WHOLE)
    step = two.step()
    assert [load.blocks for load in step.loads] == [[4, 2, 0, 3]]
    two.wait(set(), {"b"})
    assert two.workers[0].failed_blocks() == set()
    assert two.payload(0, [4, 2, 0, 3]) == one.payload(0, [0, 1, 2, 3])
    # It is stored already: nothing more is, and nothing is waited for.
    two.allocated(again, [4, 2, 0, 3, 1], 0)
    again.num_computed_tokens = WHOLE
    assert not two.step({"b": (again, 3, [4, 2, 0, 3, 1])}).stores
    again.status = Status.FINISHED_STOPPED
    assert not two.scheduler.finished(again, [4, 2, 0, 3, 1])


def test_what_vllm_has_of_its_own_is_not_loaded(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "own")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    again = Request("b", PROMPT)
    assert one.matched(again, 2 * BLOCK_TOKENS) == (2 * BLOCK_TOKENS, True)
    one.allocated(again, [0, 1, 2, 3], 2 * BLOCK_TOKENS)
    (load,) = one.step().loads
    assert (load.first, len(load.tokens)) == (2 * BLOCK_TOKENS, WHOLE)
    one.wait(set(), {"b"})
    assert one.matched(Request("c", PROMPT), WHOLE) == (0, False)


def test_ranks_hit_only_where_all_have_it(node: Node, engines: ExitStack) -> None:
    both = start(engines, node, "ranks", ranks=2)
    alone = both.workers.pop()  # the second rank stores nothing
    both.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    both.workers.append(alone)
    assert both.matched(Request("b", PROMPT)) == (0, False)
    both.compute(Request("c", PROMPT), [0, 1, 2, 3, 4])
    again = Request("d", PROMPT)
    assert both.matched(again) == (WHOLE, True)
    expected = [both.payload(rank, [0, 1, 2, 3]) for rank in range(2)]
    assert expected[0] != expected[1]
    both.allocated(again, [4, 3, 2, 1], WHOLE)
    both.step()
    both.wait(set(), {"d"})
    assert [both.payload(rank, [4, 3, 2, 1]) for rank in range(2)] == expected


def test_blocks_of_a_preempted_request_are_not_read_any_more(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "preempted")
    request = Request("a", PROMPT)
    assert one.matched(request) == (0, False)
    one.allocated(request, [0, 1, 2, 3, 4], 0)
    one.step({"a": (request, len(PROMPT), [0, 1, 2, 3, 4])})
    one.step(preempted=("a",))
    reads = []
    pack = BlockCopier.pack

    def watched(self: BlockCopier, *arguments: Any) -> None:
        reads.append(arguments)
        pack(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockCopier, "pack", watched)
        one.wait(set(), set())
        one.workers[0]._stores.submit(lambda: None).result(10)  # behind what was queued
    assert not reads
    # It comes back and is stored then.
    request.num_computed_tokens = 0
    one.matched(request)
    one.allocated(request, [4, 3, 2, 1, 0], 0)
    one.step({"a": (request, len(PROMPT), [4, 3, 2, 1, 0])})
    request.status = Status.FINISHED_STOPPED
    assert one.scheduler.finished(request, [4, 3, 2, 1, 0])
    one.step()
    one.wait({"a"}, set())
    assert one.matched(Request("b", PROMPT)) == (WHOLE, True)


def test_a_load_that_breaks_off_names_its_blocks(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "breaks")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    again = Request("b", PROMPT)
    assert one.matched(again) == (WHOLE, True)
    one.allocated(again, [4, 3, 2, 1], WHOLE)

    def fails(*_: Any) -> None:
        raise ConnectionError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockCopier, "unpack", fails)
        one.step()
        one.wait(set(), {"b"})
    assert one.workers[0].failed_blocks() == {4, 3, 2, 1}
    assert one.workers[0].failed_blocks() == set(), "told once"
    assert one.workers[0].tally.take()["failed_loads"] == 1
    assert one.scheduler.matched(again, 0) == (0, False), "not tried again"


def test_without_a_daemon_there_are_misses_and_nothing_waits(engines: ExitStack) -> None:
    with Node(workers=0, arena_bytes="8MiB", daemon_flags={"heartbeat_ms": 1000}) as short:
        one = start(engines, short, "away")
        one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
        short.kill("daemon")
        while any(link.session is not None for link in one.links):
            time.sleep(0.005)
        request = Request("b", PROMPT)
        assert one.scheduler.matched(request, 0) == (0, False)
        one.allocated(request, [0, 1, 2, 3, 4], 0)
        assert not one.step({"b": (request, len(PROMPT), [0, 1, 2, 3, 4])}).stores
        request.status = Status.FINISHED_STOPPED
        assert not one.scheduler.finished(request, [0, 1, 2, 3, 4])


def test_a_daemon_that_hangs_is_not_waited_for(engines: ExitStack) -> None:
    with Node(workers=0, arena_bytes="8MiB", daemon_flags={"heartbeat_ms": 200}) as short:
        one = start(engines, short, "hangs")
        one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
        short.kill("daemon", signal.SIGSTOP)
        try:
            assert one.matched(Request("b", PROMPT)) == (0, False)
        finally:
            short.kill("daemon", signal.SIGCONT)


def test_a_request_that_goes_while_it_loads_leaves_no_lease(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "goes")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    again = Request("b", PROMPT)
    assert one.matched(again) == (WHOLE, True)
    one.allocated(again, [4, 3, 2, 1], WHOLE)
    one.step()
    again.status = Status.FINISHED_ABORTED
    assert not one.scheduler.finished(again, [4, 3, 2, 1]), "vLLM keeps the blocks by itself"
    one.wait(set(), {"b"})
    assert "b" not in one.scheduler._followed
    deadline = time.monotonic() + 5
    while node.cache_stats().leases:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_after_a_reset_nothing_of_before_is_found_nor_by_others(node: Node, engines: ExitStack) -> None:
    """vLLM resets when its weights were changed in place."""
    one, other = start(engines, node, "reset"), start(engines, node, "reset")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    one.scheduler.reset()
    assert one.matched(Request("b", PROMPT)) == (0, False)
    longer = [*PROMPT, *PROMPT]
    one.compute(Request("c", longer[: 2 * BLOCK_TOKENS + 1]), [0, 1, 2])
    assert one.matched(Request("d", longer)) == (2 * BLOCK_TOKENS, True)
    assert other.matched(Request("e", longer)) == (WHOLE, True), "of before, which is right for it"


def test_a_request_that_failed_stores_no_answer(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "failed")
    request = Request("a", PROMPT)
    one.matched(request)
    one.allocated(request, [0, 1, 2, 3, 4], 0)
    request.num_computed_tokens, request.status = WHOLE, Status.FINISHED_ERROR
    assert not one.scheduler.finished(request, [0, 1, 2, 3, 4])


# ---- salts ----------------------------------------------------------------------------------------------------


def test_a_cache_salt_is_the_tenants_salt() -> None:
    assert salt_of(Request("a", PROMPT, cache_salt="alice")) == b"alice"
    assert salt_of(Request("a", PROMPT)) == b""
    assert len(salt_of(Request("a", PROMPT, cache_salt="x" * 1000))) <= 256


def test_an_adapter_is_known_by_its_contents(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    lora = SimpleNamespace(lora_name="l", lora_path=str(tmp_path))
    first = salt_of(Request("a", PROMPT, lora_request=lora))
    assert first == salt_of(Request("b", PROMPT, lora_request=SimpleNamespace(lora_name="m", lora_path=str(tmp_path))))
    assert first != salt_of(Request("a", PROMPT, lora_request=lora, cache_salt="alice"))
    assert first[0] == 0xFF, "no cache_salt has this byte"
    weights.write_bytes(b"other")
    assert salt_of(Request("a", PROMPT, lora_request=lora)) != first
    weights.unlink()
    with pytest.raises(Unidentified, match="the LoRA adapter l has no weights at"):
        salt_of(Request("a", PROMPT, lora_request=lora))


def test_nothing_behind_an_image_is_kept() -> None:
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=20))
    assert cacheable_tokens(Request("a", PROMPT, mm_features=[image])) == 20
    assert cacheable_tokens(Request("a", PROMPT, prompt_embeds=object())) == 0
    assert cacheable_tokens(Request("a", PROMPT)) == len(PROMPT)
