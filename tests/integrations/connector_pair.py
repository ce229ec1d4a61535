"""Minimal vLLM: both halves of the connector on a real daemon, with the calls that vLLM's scheduler makes."""

from __future__ import annotations

import enum
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.integrations.vllm.connector_settings import ConnectorSettings
from kvsidecar.integrations.vllm.scheduler_connector import SchedulerConnector
from kvsidecar.integrations.vllm.step_metadata import StepJobs
from kvsidecar.integrations.vllm.worker_connector import WorkerConnector
from kvsidecar.kv_transfer.block_copier import BlockCopier, slots_of
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

from benchmarks.node import Node
from tests.cache_daemon.conftest import descriptor
from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS, BLOCKS, apart, fill, geometry, packed

PROMPT = list(range(500, 500 + 4 * BLOCK_TOKENS + 3))
WHOLE = 4 * BLOCK_TOKENS


class Status(enum.Enum):
    """Request states with vLLM's names."""

    RUNNING = 1
    FINISHED_STOPPED = 2
    FINISHED_ABORTED = 3
    FINISHED_ERROR = 4


@dataclass
class Request:
    """The fields of vLLM's ``Request`` that the connector uses."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    status: Status = Status.RUNNING
    kv_hints: Any = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return self.status is not Status.RUNNING


class Vllm:
    """A scheduler and its tensor-parallel ranks."""

    def __init__(
        self,
        node: Node,
        name: str,
        *,
        ranks: int = 1,
        transposed: bool = False,
        chunk_tokens: int = BLOCK_TOKENS,
        reset_keeps_chunks: bool = False,
        **roles: bool,
    ) -> None:
        settings = ConnectorSettings(
            str(node.cache_socket),
            chunk_tokens=chunk_tokens,
            timeout_ms=20_000,
            min_load_tokens=1,
            reset_keeps_chunks=reset_keeps_chunks,
        )
        self.scheduler = SchedulerConnector(settings, BLOCK_TOKENS, BLOCKS, **roles)
        self.caches, self.workers, self.writes = [], list[WorkerConnector](), []
        for rank in range(ranks):
            cache, write = apart("bhct") if transposed else packed()
            described = descriptor(name, geometry(torch.bfloat16))
            described.tensor_parallel_rank, described.tensor_parallel_size = rank, ranks
            link = DaemonConnection(ServiceAddress(node.cache_socket), f"{name}-{rank}", described)
            assert link.wait(30)
            self.caches.append(cache)
            self.writes.append(write)
            self.workers.append(WorkerConnector(settings, cache, link, rank, BLOCK_TOKENS))
        self.scheduler.set_worker_handshakes({i: w.handshake() for i, w in enumerate(self.workers)})
        self.links = [rank.connection for rank in self.scheduler._ranks]
        assert all(link.wait(30) for link in self.links)

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def matched(self, request: Request, local: int = 0) -> tuple[int, bool]:
        deadline = time.monotonic() + 30
        while True:
            tokens, later = self.scheduler.get_num_new_matched_tokens(request, local)
            if tokens is not None:
                return tokens, later
            assert time.monotonic() < deadline

    def allocated(self, request: Request, blocks: list[int], external: int) -> None:
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), external)

    def step(
        self, scheduled: dict[str, tuple[Request, int, list[int]]] | None = None, preempted: tuple[str, ...] = ()
    ) -> StepJobs:
        """Run a step: schedule the given number of tokens of each request in blocks, and call the workers."""
        given = scheduled or {}
        output = SimpleNamespace(
            preempted_req_ids=set(preempted),
            num_scheduled_tokens={name: tokens for name, (_, tokens, _) in given.items()},
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda name: (given[name][2],)),
        )
        step = self.scheduler.build_connector_meta(output)
        for request, tokens, _ in given.values():
            request.num_computed_tokens += tokens
        for worker in self.workers:
            worker.handle_preemptions(step)
            worker.start_load_kv(step)
            worker.start_store_kv(step)
        return step

    def wait(self, sent: set[str], received: set[str]) -> None:
        """Wait until all ranks have reported the requests."""
        for worker in self.workers:
            gone, came = set[str](), set[str]()
            deadline = time.monotonic() + 30
            while not (gone >= sent and came >= received):
                assert time.monotonic() < deadline, f"sent {gone}, received {came}"
                more = worker.get_finished()
                gone, came = gone | more[0], came | more[1]
                time.sleep(0.002)
            assert (gone, came) == (sent, received)
        self.scheduler.finished_recving(received)
        self.scheduler.finished_sending(sent)

    def compute(self, request: Request, blocks: list[int]) -> None:
        """Prefill a whole request in one step, then finish it."""
        self.allocated(request, blocks, 0)
        for i, write in enumerate(self.writes):
            fill(write, torch.from_numpy(slots_of(blocks, BLOCK_TOKENS)), torch.bfloat16, seed=i)
        self.step({request.request_id: (request, request.num_tokens, blocks)})
        request.status = Status.FINISHED_STOPPED
        if self.scheduler.request_finished(request, blocks):
            self.step()
            self.wait({request.request_id}, set())

    def payload(self, rank: int, blocks: list[int]) -> bytes:
        g = self.caches[rank].geometry
        header = new_header(Geometry(g.layers, g.kv_heads, g.head_dim, g.dtype, 16), [0] * len(blocks) * 8, 0)
        out = memoryview(bytearray(header.payload_bytes))
        BlockCopier(self.caches[rank]).pack(slots_of(blocks, BLOCK_TOKENS), header, out)
        return bytes(out)


def start(stack: ExitStack, node: Node, name: str, **options: Any) -> Vllm:
    found = Vllm(node, name, **options)
    stack.callback(found.close)
    return found


def until_no_lease(node: Node) -> None:
    deadline = time.monotonic() + 30
    while node.cache_stats().leases:
        assert time.monotonic() < deadline
        time.sleep(0.01)
