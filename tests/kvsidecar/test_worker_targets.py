"""Clients without an address know all workers of the node, and go on with another when one is not there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar import AsyncClient, Client
from kvsidecar.errors import Cancelled, DeadlineExceeded, InvalidRequest, Unavailable
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

from benchmarks.condition_wait import until


def counted(response: Callable[[Worker], Any]) -> Any:
    """Return a method of a worker that counts its calls and returns ``response(worker)``."""

    def method(worker: Worker, request: Any, context: Any) -> Any:
        worker.asked += 1
        return response(worker)

    return method


class Worker(InferenceServiceServicer):
    """Worker that answers with its name, or fails with a status before or after its first message."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name, self.code, self.pieces, self.asked = f"{number}", grpc.StatusCode.OK, 2, 0
        self.free = threading.Event()
        self.free.set()
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_InferenceServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{folder}/worker-{number}.sock")
        self._server.start()

    def fail(self, code: grpc.StatusCode, pieces: int = 0) -> None:
        self.code, self.pieces = code, pieces

    def end(self) -> None:
        self._server.stop(None).wait()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        self.asked += 1
        self.free.wait(30)
        if self.code is not grpc.StatusCode.OK:
            context.abort(self.code, "gone")
        return pb.GenerateResponse(text=self.name)

    Warm = counted(lambda _: pb.WarmResponse())
    ReleaseSession = counted(lambda _: pb.ReleaseSessionResponse(released_chunks=3))
    Tokenize = counted(lambda _: pb.TokenizeResponse(token_ids=[4]))
    Detokenize = counted(lambda worker: pb.DetokenizeResponse(text=worker.name))
    GetModel = counted(lambda _: pb.GetModelResponse())
    GetStats = counted(lambda _: pb.GetStatsResponse())

    def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> Iterator[pb.GenerateStreamResponse]:
        self.asked += 1
        for _ in range(self.pieces):
            yield pb.GenerateStreamResponse(text=self.name)
        if self.code is not grpc.StatusCode.OK:
            context.abort(self.code, "gone")
        yield pb.GenerateStreamResponse(finish_reason=pb.FINISH_REASON_STOP)


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    monkeypatch.setenv("KVSIDECAR_RUNTIME_DIR", str(tmp_path))
    found = [Worker(tmp_path, number) for number in range(3)]
    yield found
    for worker in found:
        worker.end()


def both(client: Client) -> tuple[str, str]:
    return client.generate("x", deadline=20).text, "".join(part.text for part in client.stream("x", deadline=20))


async def both_of_async() -> tuple[str, str]:
    async with AsyncClient() as client:
        return (await client.generate("x")).text, "".join([part.text async for part in client.stream("x")])


def test_the_first_is_asked_and_then_the_next_that_is_there(workers: list[Worker]) -> None:
    with Client() as client:
        assert both(client) == ("0", "00")
        workers[0].end()
        workers[1].fail(grpc.StatusCode.UNAVAILABLE)
        assert both(client) == ("2", "22")
        assert workers[1].asked == 1, "the one that answered is asked first from then on"
    assert asyncio.run(both_of_async()) == ("2", "22")


CALLS: dict[str, Callable[[Any], Any]] = {
    "warm": lambda client: client.warm("x", deadline=20),
    "release_session": lambda client: client.release_session("s"),
    "tokenize": lambda client: client.tokenize("x"),
    "detokenize": lambda client: client.detokenize([1]),
    "model": lambda client: client.model(),
    "stats": lambda client: client.stats(),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_goes_on_with_another_worker(workers: list[Worker], name: str) -> None:
    async def asynchronously() -> None:
        async with AsyncClient() as client:
            await CALLS[name](client)

    workers[0].end()
    with Client() as client:
        CALLS[name](client)
    asyncio.run(asynchronously())
    assert [worker.asked for worker in workers] == [0, 2, 0]


def test_what_has_begun_is_not_asked_for_again(workers: list[Worker]) -> None:
    workers[0].fail(grpc.StatusCode.UNAVAILABLE, pieces=1)
    with Client() as client:
        parts = client.stream("x")
        assert next(parts).text == "0"
        with pytest.raises(Unavailable):
            list(parts)
    assert [worker.asked for worker in workers] == [1, 0, 0]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
    ],
)
def test_what_would_fail_elsewhere_is_not_tried_there(
    workers: list[Worker], code: grpc.StatusCode, error: type[Exception]
) -> None:
    workers[0].fail(code)
    with Client() as client:
        with pytest.raises(error):
            client.generate("x")
        with pytest.raises(error):
            list(client.stream("x"))
    assert [worker.asked for worker in workers] == [2, 0, 0]


def test_each_is_tried_once_and_then_it_is_an_error(workers: list[Worker]) -> None:
    for worker in workers:
        worker.fail(grpc.StatusCode.UNAVAILABLE)
    with Client() as client, pytest.raises(Unavailable):
        client.generate("x")
    assert [worker.asked for worker in workers] == [1, 1, 1]


def test_who_names_a_worker_gets_that_one(workers: list[Worker], tmp_path: Path) -> None:
    workers[1].fail(grpc.StatusCode.UNAVAILABLE)
    with Client(tmp_path / "worker-1.sock") as client, pytest.raises(Unavailable):
        client.generate("x")
    assert [worker.asked for worker in workers] == [0, 1, 0]


@pytest.mark.parametrize("of_node", [True, False], ids=["the node's workers", "one worker"])
def test_a_call_of_a_client_that_is_closed_is_cancelled_and_not_sent_again(
    of_node: bool, workers: list[Worker], tmp_path: Path
) -> None:
    for worker in workers:
        worker.free.clear()
    client = Client(None if of_node else tmp_path / "worker-0.sock")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.generate, "hello")
        until(lambda: workers[0].asked == 1)
        client.close()
        with pytest.raises(Cancelled, match="the client is closed"):
            call.result(30)
    for worker in workers:
        worker.free.set()
    assert [worker.asked for worker in workers] == [1, 0, 0]
    for later in (lambda: client.generate("hello"), lambda: next(client.stream("hello"))):
        with pytest.raises(Cancelled, match="the client is closed"):
            later()
    client.close()
