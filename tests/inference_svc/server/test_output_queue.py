"""Streams: how many tokens a message has, and that their number changes nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.errors import Cancelled
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import to_request

from benchmarks.condition_wait import until
from inference_svc.sampling.logprobs import SampledToken
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput
from inference_svc.server.inference_service import InferenceService
from inference_svc.server.output_queue import OutputQueue
from inference_svc.server.runtime import Runtime, build_runtime
from inference_svc.server.worker_config import WorkerConfig


def token(number: int, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(f"{number} ", SampledToken(number), finish)


async def taken(queue: OutputQueue) -> list[SequenceOutput]:
    async with asyncio.timeout(10):
        return await queue.get()


async def test_outputs_arrive_one_by_one_or_in_groups() -> None:
    queue = OutputQueue()
    for number in range(3):
        queue.put(token(number))
        assert await taken(queue) == [token(number)]
    for number in range(3):  # the loop is busy meanwhile
        queue.put(token(number))
    assert await taken(queue) == [token(0), token(1), token(2)]


async def test_after_the_first_token_an_interval_of_tokens_arrives_together() -> None:
    queue = OutputQueue(interval=3)
    queue.put(token(0))
    assert await taken(queue) == [token(0)]
    waiting = asyncio.create_task(queue.get())
    for number in (1, 2):
        await asyncio.to_thread(queue.put, token(number))
    assert not waiting.done()
    await asyncio.to_thread(queue.put, token(3))
    assert await waiting == [token(1), token(2), token(3)]
    queue.put(token(4))
    queue.put(token(5, FinishReason.STOP))
    assert await taken(queue) == [token(4), token(5, FinishReason.STOP)]
    queue.put(SequenceOutput(stored_tokens=6))
    assert await taken(queue) == [SequenceOutput(stored_tokens=6)]


async def test_an_error_waits_for_no_more_tokens() -> None:
    queue, failed = OutputQueue(interval=8), SequenceOutput(error=Cancelled("enough"))
    queue.put(token(0))
    queue.put(token(1))
    queue.put(failed)
    assert await taken(queue) == [token(0), token(1), failed]


def test_outputs_after_the_end_of_the_loop_are_ignored() -> None:
    async def made() -> OutputQueue:
        return OutputQueue()

    queue = asyncio.run(made())
    queue.put(token(0))
    queue.put(token(1))


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder: Path = tmp_path_factory.mktemp("worker")
    config = WorkerConfig(model="demo", socket=folder / "w.sock", cache_socket=None, pool_bytes=32 << 20)
    found = build_runtime(config)
    yield found
    found.close()


def with_interval(runtime: Runtime, interval: int) -> InferenceService:
    config = runtime.config.model_copy(update={"stream_interval": interval})
    return InferenceService(replace(runtime, config=config))


async def streamed(service: InferenceService, **options: Any) -> list[pb.GenerateStreamResponse]:
    request = to_request("The chunks of a prompt", temperature=0, ignore_eos=True, **options)
    return [part async for part in service._generate(request)]


async def test_a_message_has_as_many_tokens_as_the_interval(runtime: Runtime) -> None:
    parts = await streamed(with_interval(runtime, 4), max_tokens=11)
    sizes = [len(part.token_ids) for part in parts]
    assert sizes[0] == 1
    assert sum(sizes) == 11
    assert all(size >= 4 for size in sizes[1:-1])
    assert [bool(part.request_id) for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.finish_reason for part in parts[:-1]] == [0] * (len(parts) - 1)
    assert parts[-1].finish_reason == pb.FINISH_REASON_LENGTH


async def test_the_interval_changes_no_answer(runtime: Runtime) -> None:
    request = to_request("The chunks of a prompt", max_tokens=24, logprobs=2, temperature=0, ignore_eos=True)
    request.continuous_usage = request.return_prompt_tokens = True
    request.cache.skip_read = request.cache.skip_write = True
    answers = []
    context: Any = None
    for interval in (1, 5, 100):
        answer = await with_interval(runtime, interval).Generate(request, context)
        assert len(answer.token_ids) == len(answer.logprobs) == 24
        answer.ClearField("timings")
        answer.ClearField("request_id")
        answers.append(answer)
    assert answers[0] == answers[1] == answers[2]


async def test_the_usage_of_a_message_counts_the_tokens_sent_so_far(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is ahead of a client that reads slowly; here the answer is complete before the first message."""
    service = with_interval(runtime, 4)
    outputs = service.outputs

    async def complete(*given: Any) -> AsyncIterator[tuple[Sequence, list[SequenceOutput]]]:
        for group in [group async for group in outputs(*given)]:
            yield group

    monkeypatch.setattr(service, "outputs", complete)
    request = to_request("The chunks of a prompt", max_tokens=11, temperature=0, ignore_eos=True)
    request.continuous_usage = True
    parts = [part async for part in service._generate(request)]
    sent = list(accumulate(len(part.token_ids) for part in parts))
    assert [part.usage.generated_tokens for part in parts] == sent
    assert len(parts) > 2
    assert sent[-1] == 11


async def test_a_closed_stream_cancels_what_the_interval_holds_back(runtime: Runtime) -> None:
    request = to_request("The chunks of a prompt", max_tokens=200, temperature=0, ignore_eos=True)
    stream = with_interval(runtime, 1024)._generate(request)
    assert len((await anext(stream)).token_ids) >= 1
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.to_thread(until, lambda: not runtime.engine.load[0])
