"""An engine that cannot continue fails all requests, and its worker exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar.errors import Unavailable
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub

from inference_svc import Engine as Embedded
from inference_svc.engine import engine_core as loops
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import layerwise_load as gates
from inference_svc.model_runner.engine_lost import EngineLost
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.models.loader import load
from inference_svc.sequence.kv_connector import LoadCallback, LoadResult, NullKVConnector, SaveCallback
from inference_svc.sequence.sequence import FinishReason, Sequence
from inference_svc.server.worker_server import EXIT_ENGINE_STOPPED
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request, small_engine


class HungCache(NullKVConnector):
    """Connector that begins to load prompts of 100 tokens and to save all answers, but never finishes."""

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        return sequence.request.num_prompt_tokens == 100

    def save(self, sequence: Sequence, pool: KVPool, done: SaveCallback) -> bool:
        return True


def engine_over(cache: NullKVConnector, **limits: Any) -> Engine:
    loaded = load("demo", dtype="float32")
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 4096, loaded.dtype, loaded.device)
    return Engine(loaded, pool, cache, EngineLimits(**limits))


def broken() -> int:
    raise MemoryError("injected")


def ends(engine: Engine) -> str:
    return str(engine.died.result(20))


def test_whatever_leaves_the_loop_is_told_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(HungCache(), max_num_seqs=3)
    saved = Request(prompt(1, 20), 1)
    engine.submit(saved.sequence)
    saved.tokens()
    loading, running, waiting = Request(prompt(2, 100), 5), Request(prompt(3, 30), 3000), Request(prompt(4, 30), 5)
    for request in (loading, running, Request(prompt(5, 30), 3000), waiting):
        engine.submit(request.sequence)
    while not running.outputs:
        time.sleep(0.001)
    assert engine.ailment == ""
    monkeypatch.setattr(engine, "_count_free_pages", broken)
    assert "MemoryError: injected" in ends(engine)
    for request in (loading, running, waiting):
        assert request.ended.wait(20)
        assert request.outputs[-1].finish is FinishReason.FAILED
        assert "the engine has stopped" in str(request.outputs[-1].error)
    assert isinstance(saved.outputs[-1].error, Unavailable), "whoever waits for it to be stored waits for ever"
    with pytest.raises(Unavailable, match="the engine has stopped: MemoryError: injected"):
        engine.submit(Request(prompt(6, 30), 1).sequence)
    with pytest.raises(Unavailable, match="the engine has stopped"):
        engine.between_steps(lambda: None)
    assert "MemoryError" in engine.ailment
    engine.stop()


def test_what_is_asked_of_a_stopping_engine_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that no step will read: a request and work between steps."""
    engine = small_engine(4096)
    entered, go_on = threading.Event(), threading.Event()

    def break_late() -> int:
        entered.set()
        assert go_on.wait(20)
        return broken()

    monkeypatch.setattr(engine, "_count_free_pages", break_late)
    first, second = Request(prompt(1, 30), 5), Request(prompt(2, 30), 5)
    engine.submit(first.sequence)
    assert entered.wait(20)
    engine.submit(second.sequence)
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(engine.between_steps, lambda: None)
        while len(engine._events._events) < 2:
            time.sleep(0.001)
        go_on.set()
        with pytest.raises(Unavailable, match="the engine has stopped"):
            work.result(20)
    assert second.ended.wait(20)
    assert "the engine has stopped" in str(second.outputs[-1].error)


def test_an_engine_that_ends_tells_who_waits_for_a_save() -> None:
    engine = engine_over(HungCache())
    requests = [Request(prompt(i, 20), 1) for i in range(2)]

    def fail(output: object) -> None:
        raise RuntimeError("nobody is there")

    for request in requests:
        engine.submit(request.sequence)
        request.tokens()
    requests[0].sequence.sink = fail
    engine.stop()
    assert isinstance(requests[1].outputs[-1].error, Unavailable)
    assert not engine.died.done(), "a sink that fails is no failure of the engine"


def test_a_lost_device_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a CUDA context are sticky: one request's failure would be that of all that follow."""
    engine = small_engine(4096)
    request = Request(prompt(1, 30), 5)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    asked = list[torch.device]()

    def synchronize(device: torch.device) -> None:
        asked.append(device)
        fail()

    monkeypatch.setattr(engine._core, "compute", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(engine._core, "_device", torch.device("cuda", 0))
    engine.submit(request.sequence)
    assert "cuda:0 computes no more: CUDA error" in ends(engine)
    assert request.ended.wait(20)
    assert len(asked) == 1


def test_a_device_that_goes_on_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine(4096)
    compute, request, after = engine._core.compute, Request(prompt(1, 30), 5), Request(prompt(2, 30), 5)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no memory for it")

    monkeypatch.setattr(loops, "check_device", lambda device, error: None)
    monkeypatch.setattr(engine._core, "compute", fail)
    engine.submit(request.sequence)
    assert request.ended.wait(20)
    assert "no memory for it" in str(request.outputs[-1].error)
    monkeypatch.setattr(engine._core, "compute", compute)
    engine.submit(after.sequence)
    assert len(after.tokens()) == 5
    engine.stop()


class HalfLoaded(NullKVConnector):
    """Connector that reports a load as started, but delivers only the first layer."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        gate = LayerReadyEvent(pool.keys.shape[0])
        gate.open(1)
        self.asked.set()
        threading.Thread(target=done, args=(sequence, LoadResult(tokens=64, gate=gate))).start()
        return True


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_copy_that_hangs_ends_the_engine(cancelled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may write at any time: the pages can be nobody else's, and the sequence cannot be read again."""
    monkeypatch.setattr(gates, "MAX_COPY_SECONDS", 0.3)
    cache = HalfLoaded()
    engine = engine_over(cache)
    request = Request(prompt(1, 100), 5)
    engine.submit(request.sequence)
    if cancelled:
        assert cache.asked.wait(20)
        engine.cancel(request.sequence)
    assert "has not ended" in ends(engine)
    assert request.ended.wait(20)


def test_a_step_that_hangs_is_an_ailment_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.engine.engine._MAX_STEP_SECONDS", 0.1)
    monkeypatch.setattr("inference_svc.engine.engine._MAX_STEP_RATIO", 0.0)
    engine = small_engine(4096)
    entered, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert go_on.wait(20)

    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(engine.between_steps, hang)
        assert entered.wait(20)
        eventually(lambda: "a step of the engine has taken" in engine.ailment)
        go_on.set()
        work.result(20)
        eventually(lambda: engine.ailment == "")
    time.sleep(0.15)
    assert engine.ailment == "", "waiting for requests is no step"
    engine.stop()


def test_work_that_ends_the_engine_tells_its_caller() -> None:
    engine = small_engine(4096)

    def lose() -> None:
        raise EngineLost("a layer's copy hangs")

    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(engine.between_steps, lose)
        with pytest.raises(Unavailable, match="a layer's copy hangs"):
            work.result(20)
    eventually(engine.died.done)
    engine.stop()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_embedded_engine_raises_when_it_has_stopped() -> None:
    with Embedded.from_pretrained("demo", cache=None, threads=1, pool_bytes=64 << 20) as engine:
        stream = engine.stream("hello", max_tokens=3000, ignore_eos=True)
        next(stream)
        engine._runtime.engine._count_free_pages = broken  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="the engine has stopped"):
            list(stream)
        for call in (engine.generate, engine.warm):
            with pytest.raises(Unavailable, match="the engine has stopped"):
                call("hello")


# ---- a worker's process -------------------------------------------------------------------------------------

_WORKER = """
    import sys, time, pathlib
    from inference_svc.engine import engine
    from inference_svc.engine.engine_core import EngineCore
    from inference_svc.__main__ import main

    folder, count, step = pathlib.Path(sys.argv.pop(1)), engine.Engine._count_free_pages, EngineCore.step
    engine._MAX_STEP_SECONDS, engine._MAX_STEP_RATIO = 2.0, 0.0

    def break_when_told(loop):
        if (folder / "break").exists():
            raise MemoryError("injected")
        return count(loop)

    def hang_when_told(loop):
        while (folder / "hang").exists():
            time.sleep(0.01)
        return step(loop)

    engine.Engine._count_free_pages, EngineCore.step = break_when_told, hang_when_told
    sys.exit(main(["worker", *sys.argv[1:]]))
"""


class Worker:
    """A worker process that breaks or hangs as soon as a file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder, socket = folder, folder / "w.sock"
        flags = ["--model=demo", f"--socket={socket}", "--cache-socket=none", "--pool-bytes=64MiB", "--threads=1"]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_WORKER), str(folder), *flags], stdout=self.log, stderr=self.log
        )
        self.channel = grpc.insecure_channel(f"unix:{socket}")
        grpc.channel_ready_future(self.channel).result(120)
        self.service = InferenceServiceStub(self.channel)

    def healthy(self) -> bool:
        asked = health_pb2.HealthCheckRequest(service="kvsidecar.inference.v1.InferenceService")
        names = (asked, health_pb2.HealthCheckRequest())
        found = {health_pb2_grpc.HealthStub(self.channel).Check(name, timeout=10).status for name in names}
        return found == {health_pb2.HealthCheckResponse.SERVING}

    def generate(self, seconds: float = 30) -> pb.GenerateResponse:
        request = pb.GenerateRequest(
            prompt=pb.Prompt(text="hello"), max_tokens=4, sampling=pb.Sampling(temperature=0), ignore_eos=True
        )
        return self.service.Generate(request, timeout=seconds)

    def close(self) -> str:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        self.channel.close()
        self.log.seek(0)
        text = self.log.read()
        self.log.close()
        return text


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    found = Worker(tmp_path)
    yield found
    if not found.log.closed:
        found.close()


def test_a_worker_whose_step_hangs_is_not_healthy_and_no_gateway_chooses_it(worker: Worker) -> None:
    assert worker.healthy()
    assert worker.generate().text
    (worker.folder / "hang").touch()
    request = worker.service.Generate.future(
        pb.GenerateRequest(
            prompt=pb.Prompt(text="hello"), max_tokens=2, sampling=pb.Sampling(temperature=0), ignore_eos=True
        )
    )
    eventually(lambda: not worker.healthy())
    with pytest.raises(grpc.RpcError, match="a step of the engine has taken"):
        worker.service.GetModel(pb.GetModelRequest(), timeout=10)
    (worker.folder / "hang").unlink()
    eventually(worker.healthy)
    assert request.result(20).text
    worker.service.GetModel(pb.GetModelRequest(), timeout=10)
    assert worker.close().count("not serving") == 1


def test_a_worker_whose_engine_stops_ends_and_says_why(worker: Worker) -> None:
    worker.generate()
    (worker.folder / "break").touch()
    with pytest.raises(grpc.RpcError, match="the engine has stopped: MemoryError: injected") as failed:
        worker.generate()
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert worker.process.wait(20) == EXIT_ENGINE_STOPPED
    assert worker.close().count("ending this worker") == 1
