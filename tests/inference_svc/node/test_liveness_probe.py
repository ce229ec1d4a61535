"""A process of a node that hangs, or whose start takes long, and the supervisor that looks after it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvsidecar.process.node_report import SERVING, STARTING, read_reports

from benchmarks.condition_wait import until_async
from inference_svc.node.liveness_probe import GrpcProbe
from inference_svc.node.restarting_process import RestartingProcess
from inference_svc.node.supervisor import ServeConfig, Supervisor
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.server.worker_server import EXIT_ENGINE_STOPPED
from tests.inference_svc.node.served import Served

pytestmark = pytest.mark.timeout(500)
# A service that loads for a few seconds and says NOT_SERVING after SIGUSR1.
_SERVICE = """
import signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
time.sleep(float(sys.argv[2]))
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(f"unix:{sys.argv[1]}")
server.start()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
def fail(*_): servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
signal.signal(signal.SIGUSR1, fail)
def drain(*_):
    server.stop(0)
    time.sleep(float(sys.argv[3]))
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
while True: time.sleep(0.05)
"""
LIVENESS_SECONDS, DEADLINE_SECONDS = 3.0, 150.0


@asynccontextmanager
async def supervised(
    folder: Path, loading_seconds: float = 0.0, draining_seconds: float = 0.0
) -> AsyncIterator[RestartingProcess]:
    """A child with a liveness probe under a supervisor. It closes its socket before it drains."""
    folder.chmod(0o700)
    socket = folder / "worker-0.sock"
    config = ServeConfig(model="demo", runtime_dir=folder, liveness_seconds=LIVENESS_SECONDS)
    node = Supervisor(config, WorkerConfig(model="demo"))
    command = [sys.executable, "-c", _SERVICE, str(socket), str(loading_seconds), str(draining_seconds)]
    child = node._launch("worker-0", command, GrpcProbe(socket))
    try:
        yield child
    finally:
        node._stop.set()
        await node._end_all()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1])
async def test_a_child_that_does_not_answer_or_says_not_serving_is_killed_and_started_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with supervised(tmp_path) as child:
        await asyncio.wait_for(child.ready.wait(), DEADLINE_SECONDS)
        assert child.process is not None
        first, began = child.process, time.monotonic()
        os.kill(first.pid, number)
        await until_async(lambda: child.process is not first and child.report.state == SERVING, DEADLINE_SECONDS)
        assert first.returncode == -signal.SIGKILL
        assert time.monotonic() - began >= LIVENESS_SECONDS / 2
        assert (child.report.kills, child.report.deaths) == (1, 0)
        assert read_reports(tmp_path, os.getpid())["worker-0"] == child.report


async def test_a_start_that_the_system_refuses_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example with EAGAIN: a cgroup has too many processes, mostly while another one starts, too."""
    spawn, refused = asyncio.create_subprocess_exec, list[Any]()

    async def refuse(*command: Any, **options: Any) -> Any:
        refused.append(command)
        if len(refused) < 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await spawn(*command, **options)

    async with supervised(tmp_path) as child:
        await asyncio.wait_for(child.ready.wait(), DEADLINE_SECONDS)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
        first = child.process
        assert first is not None
        first.kill()
        await until_async(lambda: child.process is not first and child.report.state == SERVING, DEADLINE_SECONDS)
        assert len(refused) == 3


async def test_a_node_whose_first_start_the_system_refuses_says_so(tmp_path: Path) -> None:
    child = RestartingProcess("worker-0", [str(tmp_path / "none")])
    assert re.match(r"worker-0 could not start: .*No such file", await child.keep_running(asyncio.Event()))


class BrokenProbe(GrpcProbe):
    """A probe that raises while the supervisor has no free descriptor."""

    broken = True

    async def answers(self, pid: int) -> bool:
        if self.broken:
            raise OSError(errno.EMFILE, "Too many open files")
        return await super().answers(pid)


async def test_a_probe_that_the_system_refuses_is_tried_again_and_kills_nothing(tmp_path: Path) -> None:
    async with supervised(tmp_path) as child:
        child.probe = probe = BrokenProbe(tmp_path / "worker-0.sock")
        await asyncio.sleep(1.5 * LIVENESS_SECONDS)
        assert child.report.state == STARTING
        probe.broken = False
        await asyncio.wait_for(child.ready.wait(), DEADLINE_SECONDS)
        process, probe.broken = child.process, True
        await asyncio.sleep(1.5 * LIVENESS_SECONDS)
        assert child.process is process
        assert child.report.kills == 0


async def test_a_child_may_be_silent_while_it_drains(tmp_path: Path) -> None:
    """A gateway that drained for longer than the liveness limit was killed, and lost its streams."""
    async with supervised(tmp_path, draining_seconds=3 * LIVENESS_SECONDS) as child:
        await asyncio.wait_for(child.ready.wait(), DEADLINE_SECONDS)
        process = child.process
        assert process is not None
        await child.terminate()
        assert process.returncode == 0
        assert child.report.kills == 0


# A worker whose device is the fake driver's: after the file is there, its context is dead, and the process may hang.
_WORKER = """
    import os, sys, time, pathlib, torch
    from inference_svc.__main__ import main
    from inference_svc.engine import engine, engine_core
    from inference_svc.model_runner import engine_lost
    from inference_svc.server.runtime import Runtime
    from kvkernels.cuda.cuda_driver import PrimaryContext
    from tests.kvkernels.doubles.fake_driver import FakeDriver

    dead, hang = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1)
    driver, cuda, compute = FakeDriver(), torch.device("cuda", 0), engine_core.EngineCore.compute
    context = PrimaryContext(0)

    def use_device():
        with context.current():
            context.check("CUDA error", context.c.cuCtxSynchronize())

    def synchronize(device):
        while hang == "in the check":
            time.sleep(1)
        use_device()

    def compute_on_device(core, *arguments):
        if dead.exists():
            driver.kill()
        use_device()
        return compute(core, *arguments)

    def close(runtime):
        time.sleep(1000)

    check = engine_lost.check_device
    engine_core.check_device = engine.check_device = lambda device, error: check(cuda, error)
    engine_core.EngineCore.compute, torch.cuda.synchronize = compute_on_device, synchronize
    engine_lost._MAX_CHECK_SECONDS = 1.0
    if hang == "in the end":
        Runtime.close = close
    sys.exit(main(["worker", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("hang", ["nowhere", "in the check", "in the end"])
async def test_a_dead_cuda_context_ends_the_worker_with_its_code_and_it_is_started_again(
    tmp_path: Path, hang: str
) -> None:
    dead, socket = tmp_path / "dead", tmp_path / "worker-0.sock"
    tmp_path.chmod(0o700)
    config = ServeConfig(model="demo", runtime_dir=tmp_path, liveness_seconds=60)
    node = Supervisor(config, WorkerConfig(model="demo"))
    flags = ["--model=demo", f"--socket={socket}", "--cache-socket=none", "--pool-bytes=64MiB", "--threads=1"]
    command = [sys.executable, "-c", textwrap.dedent(_WORKER), str(dead), hang, *flags]
    child = node._launch("worker-0", command, GrpcProbe(socket))
    request = pb.GenerateRequest(
        prompt=pb.Prompt(text="hello"), max_tokens=4, sampling=pb.Sampling(temperature=0), ignore_eos=True
    )

    async def generate() -> str:
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            return str((await InferenceServiceStub(channel).Generate(request, timeout=60)).text)

    try:
        await until_async(lambda: child.report.state == SERVING, DEADLINE_SECONDS)
        assert child.process is not None
        first = child.process
        assert await generate()
        dead.touch()
        with pytest.raises(grpc.RpcError, match="the engine has stopped: EngineLost: cuda:0 computes no more"):
            await generate()
        await until_async(lambda: first.returncode is not None, DEADLINE_SECONDS)
        assert first.returncode == EXIT_ENGINE_STOPPED
        dead.unlink()
        await until_async(lambda: child.process is not first and child.report.state == SERVING, DEADLINE_SECONDS)
        assert (child.report.deaths, child.report.kills) == (1, 0)
        assert await generate()
    finally:
        node._stop.set()
        if child.process is not None and child.process.returncode is None:
            child.process.kill()  # its end hangs in one case
        await node._end_all()


async def test_a_child_that_loads_longer_than_it_may_be_silent_is_not_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path, loading_seconds=2 * LIVENESS_SECONDS) as child:
        await until_async(lambda: child.process is not None, DEADLINE_SECONDS)
        assert read_reports(tmp_path, os.getpid())["worker-0"].state == STARTING
        first = child.process
        await asyncio.wait_for(child.ready.wait(), DEADLINE_SECONDS)
        assert child.process is first
        assert child.report.kills == child.report.deaths == 0


def test_what_another_process_answers_at_its_socket_makes_no_child_ready(tmp_path: Path) -> None:
    """Beside a daemon that runs already, ``serve`` said that it is ready, and started its own again and again."""
    foreign = subprocess.Popen([sys.executable, "-c", _SERVICE, str(tmp_path / "s"), "0"])

    async def ask() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            probe = GrpcProbe(tmp_path / "s")
            while not await probe.answers(foreign.pid):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await probe.close()
            assert not await probe.answers(1)

    try:
        asyncio.run(ask())
    finally:
        foreign.kill()
        foreign.wait()


def test_a_hung_worker_of_a_node_comes_back_and_status_and_metrics_say_so(tmp_path: Path) -> None:
    """Its only worker is stopped; requests wait until it is back, longer than for one that nobody starts."""
    settings = {"KVSIDECAR_LIVENESS_SECONDS": "6", "KVSIDECAR_GATEWAY_WORKER_WAIT_SECONDS": "0.5"}
    served = Served(tmp_path, workers=1, settings=settings)
    try:
        assert served.ask().status_code == 200
        (worker,) = served.children("--name=worker-0")
        worker.suspend()
        served.until(lambda: any(c.pid != worker.pid for c in served.children("--name=worker-0")))
        answer = served.ask()
        assert answer.status_code == 200, answer.text
        served.until(lambda: "process does not answer, killing it" in (tmp_path / "log").read_text())
        (part,) = [part for part in json.loads(served.run("status", "--json").stdout) if part["name"] == "worker-0"]
        assert (part["restarts"], part["kills"]) == (1, 1)
        assert "1 of them because it did not answer" in " ".join(served.run("status", columns=1000).stdout.split())
        metrics = httpx.get(f"{served.url}/metrics", timeout=10).text
        assert 'kvsidecar_process_restarts_total{process="worker-0",reason="silent"} 1.0' in metrics
        assert '"path": "/health", "status": 503' not in (tmp_path / "log").read_text(), "no line for each probe"
    finally:
        served.end()


def test_a_request_waits_for_a_worker_that_was_killed_as_long_as_it_loads(tmp_path: Path) -> None:
    settings = {"KVSIDECAR_GATEWAY_WORKER_WAIT_SECONDS": "0.5"}
    served = Served(tmp_path, workers=1, settings=settings)
    try:
        (worker,) = served.children("--name=worker-0")
        answers: list[httpx.Response] = []
        worker.kill()
        reports = tmp_path / "kvsidecar", served.process.pid
        served.until(lambda: read_reports(*reports)["worker-0"].state == STARTING)
        asking = threading.Thread(target=lambda: answers.append(served.ask()))
        asking.start()
        asking.join(DEADLINE_SECONDS)
        assert [answer.status_code for answer in answers] == [200], answers[0].text
    finally:
        served.end()


def test_a_deleted_runtime_folder_comes_back_and_a_worker_that_dies_then_finds_its_cache(tmp_path: Path) -> None:
    """It came back without a cache, and ``status`` named neither the cache nor the gateway and exited 0."""
    served = Served(tmp_path, workers=1)
    try:
        assert served.ask().status_code == 200
        # Without a chunk there, its tokens are in the worker alone.
        served.until(lambda: json.loads(served.run("cache", "stats", "--json").stdout)["chunks"] > 0)
        assert cached_tokens(served.ask()) > 0
        (worker,) = served.children("--name=worker-0")
        (daemon,) = served.children("cache_daemon")
        shutil.rmtree(tmp_path / "kvsidecar")
        worker.kill()
        served.until(lambda: any(child.pid != worker.pid for child in served.children("--name=worker-0")))
        parts: dict[str, dict[str, Any]] = {}

        def serving() -> bool:
            said = served.run("status", "--json")
            parts.update({part["name"]: part for part in json.loads(said.stdout or "[]")})
            return said.returncode == 0 and "worker-0" in parts and "attached" in parts["worker-0"]["detail"]

        served.until(serving)
        assert set(parts) == {"cache", "worker-0", "gateway"}
        assert cached_tokens(served.ask()) > 0, "what was cached before"
        assert served.children("cache_daemon") == [daemon], "it was not started again"
        assert parts["cache"]["restarts"] == 0
    finally:
        served.end()


def cached_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
