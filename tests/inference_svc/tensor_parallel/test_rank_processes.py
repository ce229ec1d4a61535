"""Ranks as processes: equal answers, hits after the death of any rank, and no rank that stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.client import Completion
from kvsidecar.errors import KVSidecarError, Unavailable

from benchmarks.node import Node
from inference_svc.models.tensor_parallel.rank_group import RankGroup
from inference_svc.server.runtime import build_runtime
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.server.worker_server import EXIT_ENGINE_STOPPED
from inference_svc.tensor_parallel import rank_processes
from inference_svc.tensor_parallel.rank_messages import Joined

TEXT = "The keeper of the lighthouse wrote down every ship that passed in the night, and the weather. " * 12


@pytest.fixture(scope="module")
def ranks() -> Iterator[Node]:
    """A daemon and a worker of two ranks that keeps nothing in its pool, so that hits come from the daemon."""
    flags = {"resident_sequences": 0, "tensor_parallel_size": 2, "dtype": "float32", "speculate": "ngram"}
    with Node("demo", arena_bytes="128MiB", pool_bytes="64MiB", worker_flags=flags) as running:
        yield running


def others(node: Node, i: int = 0) -> list[psutil.Process]:
    """The processes of the worker's other ranks."""
    children = psutil.Process(node.pid(f"worker-{i}")).children()
    return [child for child in children if "inference_svc.tensor_parallel" in " ".join(child.cmdline())]


def roots(node: Node) -> set[bytes]:
    """Roots of the stored chunks: one for each namespace, as all requests have the same salt."""
    with node.cache_channel() as channel:
        return {chunk.root for chunk in CacheServiceStub(channel).List(pb.ListRequest(page_size=1000)).chunks}


def ask(node: Node, prompt: str, i: int = 0, tokens: int = 12) -> Completion:
    answer = node.client(i).generate(prompt, max_tokens=tokens, temperature=0)
    node.settle()
    return answer


def test_answers_are_those_of_one_process_with_another_namespace(ranks: Node) -> None:
    first = ask(ranks, TEXT)
    again = ask(ranks, TEXT)
    assert (first.cached_tokens, again.token_ids) == (0, first.token_ids)
    assert again.cached_tokens > 200
    of_ranks = roots(ranks)
    ranks.start_worker(1, tensor_parallel_size=1)
    try:
        alone = ask(ranks, TEXT, 1)
    finally:
        ranks.kill("worker-1", signal.SIGTERM)
    assert alone.cached_tokens == 0, "the chunks of a rank are no whole model's"
    assert alone.token_ids == first.token_ids
    assert len(of_ranks) == 2, "each rank has its own namespace"
    assert len(roots(ranks) - of_ranks) == 1


def test_a_hit_after_the_death_of_rank_0(ranks: Node) -> None:
    prompt = f"Rank 0 is killed. {TEXT}"
    before, other = ask(ranks, prompt), others(ranks)[0]
    ranks.kill("worker-0")
    psutil.wait_procs([other], timeout=20)
    assert not other.is_running(), "a rank outlives rank 0"
    ranks.start_worker(0)
    after = ask(ranks, prompt)
    assert after.cached_tokens > 200
    assert after.token_ids == before.token_ids


def test_a_hit_after_the_death_of_rank_1_in_a_step(ranks: Node) -> None:
    prompt = f"Rank 1 is killed. {TEXT}"
    before, other, failed = ask(ranks, prompt), others(ranks)[0], list[KVSidecarError]()

    def run() -> None:
        try:
            ranks.client().generate(f"In a step. {TEXT}", max_tokens=3000, temperature=0)
        except KVSidecarError as error:
            failed.append(error)

    asking = threading.Thread(target=run)
    asking.start()
    while not ranks.client().stats().running:
        time.sleep(0.01)
    other.kill()
    asking.join(30)
    assert isinstance(failed[0], Unavailable), "the caller may retry elsewhere"
    assert ranks._processes["worker-0"].wait(20) == EXIT_ENGINE_STOPPED
    assert f"rank 1 of 2 (process {other.pid}) was killed by signal 9" in ranks.read_log()
    ranks.start_worker(0)
    after = ask(ranks, prompt)
    assert after.cached_tokens > 200
    assert after.token_ids == before.token_ids


def test_a_stopped_worker_leaves_no_rank(ranks: Node) -> None:
    other, told = others(ranks)[0], ranks.read_log()
    ranks.kill("worker-0", signal.SIGTERM)
    assert not other.is_running()
    assert ranks.read_log() == told, "a stop is no loss of a rank"


def config(folder: Path, **settings: float) -> WorkerConfig:
    return WorkerConfig(
        model="demo", device="cpu", socket=folder / "w", cache_socket=None, tensor_parallel_size=2, **settings
    )


@pytest.fixture
def started() -> Callable[[], list[psutil.Process]]:
    """Children that the test started: other tests of this process may have left a zombie."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


def test_a_rank_that_does_not_come_up(tmp_path: Path, started: Callable[[], list[psutil.Process]]) -> None:
    """The imports of a rank alone take longer than the timeout."""
    with pytest.raises(Unavailable, match="rank 1 of 2 did not start within 1 s"):
        build_runtime(config(tmp_path, rank_timeout_seconds=1.0))
    assert started() == []


def test_a_rank_that_dies_while_the_worker_starts(tmp_path: Path, started: Callable[[], list[psutil.Process]]) -> None:
    def kill() -> None:
        while not (found := started()):
            time.sleep(0.01)
        os.kill(found[0].pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(
        Unavailable, match=r"rank 1 of 2 \(process \d+\) was killed by signal 9 while the worker started"
    ):
        build_runtime(config(tmp_path))
    assert started() == []


def test_a_rank_that_is_gone_before_its_first_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the message: the worker once ended with a broken pipe."""

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.wait()

    monkeypatch.setattr(rank_processes, "python_command", lambda *_: ["false"])
    monkeypatch.setattr(rank_processes.subprocess, "Popen", Ended)
    ranks = rank_processes.RankProcesses(config(tmp_path))
    try:
        with pytest.raises(Unavailable, match=r"rank 1 of 2 \(process \d+\) ended with exit code 1 while"):
            ranks.expect(Joined)
    finally:
        ranks.close()


def test_ranks_that_cannot_connect_say_why_and_claim_no_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error once said "within 300 s" at once, as if a longer timeout would help."""

    def refuse(**_: Any) -> None:
        raise RuntimeError("Address family not supported by protocol")

    join = partial(RankGroup, 0, 2, torch.device("cpu"), tmp_path / "store", 1.0)
    with pytest.raises(Unavailable, match=r"2 ranks .* did not come together \(each waits at most 1 s\): Wait timeout"):
        join()
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", refuse)
    with pytest.raises(Unavailable) as refused:
        join()
    assert str(refused.value).endswith("(each waits at most 1 s): Address family not supported by protocol")
    assert "within" not in str(refused.value)
