"""What becomes of a request whose workers go away: the gateway in this process, workers that do as they are told."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import structlog
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from kvsidecar.process.node_report import SERVING, STARTING, STATE
from pydantic import ValidationError

from inference_svc.gateway.client_disconnect import ClientDisconnected, cancel_on_disconnect
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.request_guard import NODE
from inference_svc.gateway.routes import create_app

WAIT_SECONDS = 20.0
SOON = 10.0


class Worker(InferenceServiceServicer):
    """Worker that answers "abc", or dies after "ab". The test can stop it, so that it answers no call."""

    def __init__(
        self, target: Path, dies: bool = False, model: str = "m", options: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.target, self.dies, self.asked, self.scored, self.model = target, dies, 0, 0, model
        self.polls, self.options = 0, options
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.died = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=self.options)
        add_InferenceServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.target}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
        self._server = None
        self.target.unlink(missing_ok=True)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        await self.goes_on.wait()
        self.polls += 1
        return pb.GetModelResponse(model_id=self.model)

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return pb.GetStatsResponse()

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        self.asked += 1
        await self.goes_on.wait()
        scored = request.request.HasField("prompt_logprobs")
        self.scored += scored
        if scored:
            await asyncio.sleep(0.05)  # the others have begun by then
        scores = [pb.TokenLogprob(text="x"), pb.TokenLogprob(text="y", logprob=-1.5)] if scored else []
        yield pb.GenerateStreamResponse(text="a", token_ids=[1], prompt_text="xy", prompt_logprobs=scores)
        yield pb.GenerateStreamResponse(text="b", token_ids=[2])
        if self.dies:
            self.died.set()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
        yield pb.GenerateStreamResponse(text="c", token_ids=[3], finish_reason=pb.FINISH_REASON_STOP)


Ask = Callable[..., Awaitable[httpx.Response]]


@asynccontextmanager
async def serving(
    *workers: Worker, wait_seconds: float = WAIT_SECONDS, up: bool = True, supervisor_dir: Path | None = None
) -> AsyncIterator[Ask]:
    targets = ",".join(str(worker.target) for worker in workers)
    app = create_app(
        GatewayConfig(
            workers=targets, cache_socket=None, worker_wait_seconds=wait_seconds, supervisor_dir=supervisor_dir
        )
    )
    async with AsyncExitStack() as stack:
        for worker in workers:
            if up:
                await worker.start()
            stack.push_async_callback(worker.stop)
        await stack.enter_async_context(app.router.lifespan_context(app))
        client = await stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30)
        )

        async def ask(path: str = "", **options: Any) -> httpx.Response:
            if path:
                return await client.get(path)
            return await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, **options})

        yield ask


def report(folder: Path, state: str) -> None:
    """Report a worker's state as its supervisor does: this process's parent."""
    reports = {"pid": os.getppid(), "processes": {"worker-0": {"state": state}}}
    (folder / STATE).write_text(json.dumps(reports))


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def test_a_whole_answer_of_which_nothing_was_sent_is_written_again(tmp_path: Path) -> None:
    first, second = Worker(tmp_path / "0", dies=True), Worker(tmp_path / "1")
    async with serving(first, second) as ask:
        assert text(await ask()) == "abc"
    assert (first.asked, second.asked) == (1, 1)


async def test_a_stream_at_a_worker_that_stands_still_moves_to_another_one(tmp_path: Path) -> None:
    """Its connection stands, so the call itself does not fail."""
    first, second = Worker(tmp_path / "0"), Worker(tmp_path / "1")
    async with serving(first, second) as ask:
        first.goes_on.clear()
        began = time.monotonic()
        answer = await ask(stream=True)
        assert answer.text.count('"text":"') >= 3
        assert (first.asked, second.asked) == (1, 1)
        assert time.monotonic() - began < WAIT_SECONDS
        first.goes_on.set()


async def test_a_stream_at_a_worker_that_stands_still_waits_without_another_one_of_its_model(tmp_path: Path) -> None:
    worker, other = Worker(tmp_path / "0"), Worker(tmp_path / "1", model="n")
    async with serving(worker, other, wait_seconds=0) as ask:
        worker.goes_on.clear()
        asyncio.get_running_loop().call_later(9, worker.goes_on.set)
        assert '"text":"c"' in (await ask(stream=True, model="m")).text
    assert other.asked == 0


async def test_a_worker_with_as_many_answers_as_its_connection_takes_is_up(tmp_path: Path) -> None:
    """The next call on that connection waits; a poll that waited behind answers would look like a lost worker."""

    class Endless(Worker):
        async def GenerateStream(
            self, request: pb.GenerateStreamRequest, context: Any
        ) -> AsyncIterator[pb.GenerateStreamResponse]:
            self.asked += 1
            await asyncio.sleep(60)
            yield pb.GenerateStreamResponse()

    worker = Endless(tmp_path / "0", options=[("grpc.max_concurrent_streams", 3)])
    async with serving(worker) as ask:
        asked = [asyncio.create_task(ask()) for _ in range(5)]
        async with asyncio.timeout(SOON):
            while worker.asked < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            before = worker.polls
            while worker.polls < before + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await ask(path="/readyz")).status_code == 200
        (shown,) = (await ask(path=NODE)).json()["workers"]
        assert shown["state"] == "ready"
        for one in asked:
            one.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_its_worker_does_not_take_is_refused_with_its_size(tmp_path: Path, stream: bool) -> None:
    worker = Worker(tmp_path / "0", options=[("grpc.max_receive_message_length", 1000)])
    async with serving(worker) as ask:
        answer = await ask(prompt="x" * 2000, stream=stream)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert re.match(r"the request has 2\d{3} bytes; at most 1000 are allowed", error["message"])
        assert error["code"] == "invalid_request"
        assert text(await ask()) == "abc"


def test_a_body_is_never_so_large_that_no_worker_takes_its_request() -> None:
    assert GatewayConfig(max_body_bytes=48 << 20).max_body_bytes == 48 << 20
    with pytest.raises(ValidationError, match="max_body_bytes"):
        GatewayConfig(max_body_bytes=(48 << 20) + 1)


async def test_a_worker_that_ends_a_call_without_a_message_is_not_asked_again(tmp_path: Path) -> None:
    class Mute(Worker):
        async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
            return
            yield

    async with serving(Mute(tmp_path / "0"), Worker(tmp_path / "1")) as ask:
        assert text(await ask()) == "abc"


async def test_a_stream_that_began_is_not(tmp_path: Path) -> None:
    """It ends with one sentence, and is no success in the log and the metrics."""
    first, second = Worker(tmp_path / "0", dies=True), Worker(tmp_path / "1")
    with structlog.testing.capture_logs() as lines:
        async with serving(first, second) as ask:
            answer = await ask(stream=True)
            metrics = await ask(path="/metrics")
    assert 'kvsidecar_gateway_aborted_total{reason="UNAVAILABLE"} 1.0' in metrics.text
    (line,) = [line for line in lines if line["event"] == "request" and line["path"] == "/v1/completions"]
    assert (line["log_level"], line["status"], line["aborted"]) == ("error", 200, "UNAVAILABLE")
    assert '"text":"b"' in answer.text
    error = json.loads(answer.text.rstrip().rpartition("data: ")[2])["error"]
    assert error["message"] == "the worker broke off its answer; send the request again"
    assert (first.asked, second.asked) == (1, 0)


async def test_a_worker_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "0")
    async with serving(worker) as ask:
        assert text(await ask()) == "abc"
        await worker.stop()
        asked = asyncio.create_task(ask())
        await asyncio.sleep(0.5)
        assert not asked.done()
        await worker.start()
        assert text(await asked) == "abc"


async def test_a_request_waits_for_a_worker_that_starts_until_the_gateway_notices_it(tmp_path: Path) -> None:
    """Also if it would wait for no other worker. The supervisor's report is ahead of the gateway's polls."""
    worker = Worker(tmp_path / "0")
    report(tmp_path, STARTING)
    async with serving(worker, wait_seconds=0, supervisor_dir=tmp_path) as ask:
        assert text(await ask()) == "abc"
        await worker.stop()
        asked = asyncio.create_task(ask())
        await asyncio.sleep(1)
        assert not asked.done()
        report(tmp_path, SERVING)
        await asyncio.sleep(1.5)  # the gateway reads the report at most every half second
        assert not asked.done()
        await worker.start()
        assert text(await asked) == "abc"


async def test_of_two_the_one_that_comes_back_answers(tmp_path: Path) -> None:
    first, second = Worker(tmp_path / "0"), Worker(tmp_path / "1")
    async with serving(first, second, up=False) as ask:
        await first.start()
        while (await ask()).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        first.dies, began = True, time.monotonic()
        asked = asyncio.create_task(ask())
        await first.died.wait()
        first.dies = False
        assert text(await asked) == "abc"
        assert time.monotonic() - began < SOON


async def test_a_client_that_goes_takes_its_work_along() -> None:
    ended = asyncio.Event()

    class Gone:
        async def is_disconnected(self) -> bool:
            return True

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(ClientDisconnected):
        await cancel_on_disconnect(Gone(), forever())  # type: ignore[arg-type]
    async with asyncio.timeout(SOON):
        await ended.wait()


async def test_an_answer_that_comes_while_its_client_goes_is_closed() -> None:
    answered, closed = asyncio.Event(), list[str]()

    class Going:
        async def is_disconnected(self) -> bool:
            answered.set()
            await asyncio.sleep(0.01)  # the work ends while this is asked
            return True

    async def work() -> str:
        await answered.wait()
        return "an answer"

    async def close(answer: str) -> None:
        closed.append(answer)

    with pytest.raises(ClientDisconnected):
        await cancel_on_disconnect(Going(), work(), close)  # type: ignore[arg-type]
    assert closed == ["an answer"]


async def test_a_request_that_ends_workers_ends_two_of_one_at_most(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "0", dies=True)
    async with serving(worker) as ask:
        answer = await ask()
    assert answer.status_code == 503
    assert worker.asked == 2


async def test_nobody_waits_for_a_worker_that_never_was_or_longer_than_is_set(tmp_path: Path) -> None:
    began = time.monotonic()
    async with serving(Worker(tmp_path / "0"), up=False) as ask:
        answer = await ask()
        assert answer.status_code == 503
        assert "the model is still being loaded" in answer.text
    worker = Worker(tmp_path / "1")
    async with serving(worker, wait_seconds=0.3) as ask:
        assert text(await ask()) == "abc"
        await worker.stop()
        answer = await ask()
        assert answer.status_code == 503
        assert "no inference worker is up" in answer.text
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_once_for_all_its_answers(tmp_path: Path, stream: bool) -> None:
    worker = Worker(tmp_path / "0")
    async with serving(worker) as ask:
        answer = await ask(prompt=["x", "x"], n=3, echo=True, logprobs=0, stream=stream)
    assert (worker.asked, worker.scored) == (6, 2)
    assert answer.status_code == 200
    found = ["" for _ in range(6)]
    chances = [list[float | None]() for _ in range(6)]
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")[:-2]] if stream else [answer.text]
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        found[choice["index"]] += choice["text"]
        chances[choice["index"]] += (choice["logprobs"] or {}).get("token_logprobs", [])
    assert found == ["xyabc"] * 6
    assert chances == [[None, -1.5]] * 6


async def test_whatever_ends_one_of_several_answers_ends_the_request(tmp_path: Path) -> None:
    """An error that nobody thought of was waited for without end, when several answers were asked for."""
    worker = Worker(tmp_path / "0")
    app = create_app(GatewayConfig(workers=str(worker.target), cache_socket=None))
    await worker.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client,
        ):
            gateway = app.state.gateway

            async def fails(*_: object) -> AsyncIterator[pb.GenerateStreamResponse]:
                raise LookupError("no such thing")
                yield pb.GenerateStreamResponse()

            gateway.completions._services.runner._calls.stream = fails
            async with asyncio.timeout(20):
                answer = await client.post("/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 3})
        assert answer.status_code == 500
    finally:
        await worker.stop()


async def test_a_node_tells_the_fleet_that_a_worker_is_being_started(tmp_path: Path) -> None:
    """As its supervisor says."""
    worker = Worker(tmp_path / "0")
    report(tmp_path, STARTING)
    config = GatewayConfig(workers=str(worker.target), cache_socket=None, supervisor_dir=tmp_path)
    app = create_app(config)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):

        async def until(workers: int, starting: bool) -> None:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    said = (await client.get("/kvsidecar/v1/serving")).json()
                    if (said["workers"], said["starting"]) == (workers, starting):
                        return
                    await asyncio.sleep(0.01)

        await until(0, True)
        await worker.start()
        await until(1, False)
        await worker.stop()
