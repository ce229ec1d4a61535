"""Which worker a request goes to."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from kvsidecar.errors import INFERENCE_DOMAIN, Cancelled, Context, Unavailable, status_of, unary
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.worker_retry import is_retryable
from inference_svc.gateway.worker_router import (
    _MAX_HASHED_BYTES,
    _MAX_LOAD_DIFFERENCE,
    Worker,
    WorkerRouter,
    _prompt_prefix_hashes,
)


def asking(model: str, text: str = "Whose turn is it?", salt: bytes = b"") -> pb.GenerateRequest:
    return pb.GenerateRequest(model=model, prompt=pb.Prompt(text=text), cache=pb.CacheOptions(tenant_salt=salt))


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[WorkerRouter, Worker, Worker]]:
    """A router and its workers, which are up and serve the same model."""
    router = WorkerRouter(["127.0.0.1:1", "127.0.0.1:2"])
    try:
        for worker in router.workers:
            worker.alive, worker.model = True, pb.GetModelResponse(model_id="m")
        first, second = router.workers
        yield router, first, second
    finally:
        await router.close()


async def test_a_request_goes_to_who_serves_its_model() -> None:
    """Also where another model's worker has read the prompt, or has less to do."""
    router = WorkerRouter(["127.0.0.1:1", "127.0.0.1:2"])
    try:
        for worker, name in zip(router.workers, ("small", "large"), strict=True):
            worker.alive, worker.model = True, pb.GetModelResponse(model_id=name)
        small, large = router.workers
        assert router.pick(asking("small"), set()) is small
        assert router.pick(asking("large"), set()) is large
        large.in_flight = 50
        assert router.pick(asking("large"), set()) is large
        assert router.pick(asking(""), set()) is small
        with pytest.raises(Unavailable):
            router.pick(asking("large"), {large.target})
    finally:
        await router.close()


async def test_a_prompt_goes_where_its_tenant_has_read_it_and_not_where_another_has() -> None:
    """What another salt has read helps nobody: a worker's pool shares nothing beyond a salt."""
    async with two_workers() as (router, first, second):
        long = "Whose turn is it to feed the otters today? " * 50
        assert router.pick(asking("m", long, b"alice"), set()) is first
        first.in_flight = 2  # a little busier: its readers still go there, and nobody else
        assert router.pick(asking("m", long + "And tomorrow?", b"alice"), set()) is first
        assert router.pick(asking("m", long, b"bob"), set()) is second
        assert router.pick(asking("m", long), set()) is second


async def test_a_prefix_counts_until_its_worker_is_down_or_much_busier() -> None:
    async with two_workers() as (router, first, second):
        long = "Whose turn is it to feed the otters today? " * 50
        assert router.pick(asking("m", long), set()) is first
        first.in_flight = _MAX_LOAD_DIFFERENCE
        assert router.pick(asking("m", long), set()) is first
        first.in_flight += 1
        assert router.pick(asking("m", long), set()) is second
        first.in_flight, second.alive = 50, False
        assert router.pick(asking("m", long), set()) is first


def chat(*texts: str) -> pb.Prompt:
    return pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text) for text in texts]))


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        (pb.Prompt(text="a b " * 200), pb.Prompt(text="a b " * 300)),
        (chat("a" * 600, "b" * 600), chat("a" * 600, "b" * 600, "c" * 600)),
        (pb.Prompt(token_ids=pb.TokenIds(ids=range(500))), pb.Prompt(token_ids=pb.TokenIds(ids=range(900)))),
    ],
    ids=["text", "chat", "token_ids"],
)
def test_equal_beginnings_have_equal_blocks_within_a_model_and_a_salt(shorter: pb.Prompt, longer: pb.Prompt) -> None:
    def blocks(prompt: pb.Prompt, model: str = "m", salt: bytes = b"s") -> list[bytes]:
        return _prompt_prefix_hashes(
            pb.GenerateRequest(model=model, prompt=prompt, cache=pb.CacheOptions(tenant_salt=salt))
        )

    few, many = blocks(shorter), blocks(longer)
    assert len(many) > len(few) > 2
    assert many[: len(few)] == few
    assert not set(few) & set(blocks(shorter, salt=b"t"))
    assert not set(few) & set(blocks(shorter, salt=b""))
    assert not set(few) & set(blocks(shorter, model="n"))


def test_of_a_very_long_prompt_the_beginning_decides() -> None:
    blocks, messages = _MAX_HASHED_BYTES // 256, 64
    for prompt, expected in [
        (pb.Prompt(text="x" * 3 * _MAX_HASHED_BYTES), blocks),
        (pb.Prompt(token_ids=pb.TokenIds(ids=range(_MAX_HASHED_BYTES))), blocks),
        (chat(*["x" * 1000] * 2000), blocks + messages),
    ]:
        assert len(_prompt_prefix_hashes(pb.GenerateRequest(prompt=prompt))) == expected


async def test_the_next_turn_of_a_short_talk_goes_where_the_last_one_went() -> None:
    """Its worker keeps the sampled tokens of tool calls, so that they render to the same prompt again."""
    async with two_workers() as (router, first, second):
        first.in_flight = 1
        assert router.pick(pb.GenerateRequest(model="m", prompt=chat("Hi")), set()) is second
        first.in_flight, second.in_flight = 0, 1
        assert router.pick(pb.GenerateRequest(model="m", prompt=chat("Hello")), set()) is first
        assert router.pick(pb.GenerateRequest(model="m", prompt=chat("Hi", "Hello.", "Who?")), set()) is second


async def test_a_request_that_its_worker_cancelled_is_sent_to_another() -> None:
    class Cancelling:
        @unary(INFERENCE_DOMAIN)
        async def Generate(self, request: bytes, context: Context) -> bytes:
            raise Cancelled("the request was cancelled")

    server = grpc.aio.server()
    handlers = {"Generate": grpc.unary_unary_rpc_method_handler(Cancelling().Generate)}
    name = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    router = WorkerRouter([target])
    try:
        with pytest.raises(grpc.RpcError) as caught:
            await router.workers[0].client.stub.Generate(asking("m"), timeout=10)
        error = router.workers[0].error_of(caught.value)
        assert is_retryable(error)
        assert status_of(error)[1] == 503
    finally:
        await router.close()
        await server.stop(None)


@pytest.mark.parametrize("details", ["Deadline Exceeded", "Stream removed (Deadline Exceeded)"])
async def test_a_deadline_of_the_call_is_told_in_the_gateways_words(details: str) -> None:
    router = WorkerRouter(["127.0.0.1:1"])
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, metadata, metadata, details=details)
    assert "--request-seconds" in str(router.workers[0].error_of(error))
    await router.close()


async def test_a_worker_that_comes_up_is_tried_every_300_milliseconds(tmp_path: Path) -> None:
    """A client's own 1 s is too slow: requests may be waiting for the worker. A busy machine lengthens some pauses."""
    tried: list[float] = []

    def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.append(time.monotonic())
        writer.close()

    router = WorkerRouter([str(tmp_path / "worker.sock")])
    async with await asyncio.start_unix_server(refuse, tmp_path / "worker.sock"):
        await router.start()
        await asyncio.sleep(6)
        await router.close()
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert min(pauses[-4:]) < 0.6
