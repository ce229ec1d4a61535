"""Runs generation requests on workers, and merges the streams of their choices.

A request with several prompts or ``n`` choices becomes one ``GenerateRequest`` per choice. The runner merges their
streams into one stream of ``ChoiceChunk``, in order of arrival. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvsidecar.errors import InvalidRequest, KVSidecarError
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.request_limits import MAX_ANSWER_LOGPROBS
from kvsidecar.requests import REST_OF_CONTEXT, add_calls

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.http_tracing import current_span
from inference_svc.gateway.worker_retry import WorkerRetry


@dataclass(frozen=True)
class ChoiceChunk:
    """One message of a worker's stream, and the index of its choice."""

    choice: int
    part: pb.GenerateStreamResponse


@dataclass(eq=False)
class ChoiceResult:
    """A choice of an answer, accumulated from the choice's chunks."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    calls: list[pb.ToolCall] = field(default_factory=list)
    first: pb.GenerateStreamResponse | None = None
    last: pb.GenerateStreamResponse = field(default_factory=pb.GenerateStreamResponse)

    def add(self, part: pb.GenerateStreamResponse) -> None:
        self.texts.append(part.text)
        self.reasoning.append(part.reasoning)
        self.logprobs.extend(part.logprobs)
        self.token_ids.extend(part.token_ids)
        add_calls(self.calls, part.tool_calls)
        if self.first is None:
            self.first = part
        self.last = part


class AnswerLogprobs:
    """Counts the log probabilities that a request's answers keep until they are complete.

    ``option`` is the request's option for alternatives, which errors name.
    """

    def __init__(self, option: str) -> None:
        self._option, self.number = option, 0

    def add(self, part: pb.GenerateStreamResponse) -> None:
        """Count those of a part. Raises InvalidRequest if there are too many."""
        self.number += sum(1 + len(one.top) for one in part.logprobs)
        if self.number > MAX_ANSWER_LOGPROBS:
            raise InvalidRequest(
                f"the answers have more than {MAX_ANSWER_LOGPROBS} log probabilities together; ask for fewer answers, "
                f"for shorter ones, or for a smaller {self._option}",
                param=self._option,
            )


class RequestRunner:
    """Runs the requests of one gateway on its workers."""

    def __init__(self, config: GatewayConfig, calls: WorkerRetry) -> None:
        self._config, self._calls = config, calls

    def set_defaults(self, requests: list[pb.GenerateRequest], model: str) -> None:
        """Set the model, and the gateway's default ``max_tokens`` for requests without their own."""
        for request in requests:
            request.model = model
            if request.max_tokens == REST_OF_CONTEXT and self._config.default_max_tokens:
                request.max_tokens = max(self._config.default_max_tokens, request.min_tokens)

    async def run(
        self, requests: list[pb.GenerateRequest], whole: bool, wait_seconds: float | None
    ) -> AsyncIterator[ChoiceChunk]:
        """Yield the chunks of all choices as they arrive.

        With ``whole``, the iterator yields a choice's chunks only when the choice is complete, so that a retry stays
        invisible. ``wait_seconds`` is the client's limit for the wait for a worker. Closing the iterator cancels all
        choices. Raises KVSidecarError.
        """
        span = current_span()
        span.phase("prepare", span.began, time.perf_counter())
        if len(requests) == 1:
            async for part in self._calls.stream(requests[0], whole, wait_seconds):
                yield ChoiceChunk(0, part)
            return
        queue: asyncio.Queue[ChoiceChunk | BaseException | None] = asyncio.Queue()

        async def pump(choice: int, request: pb.GenerateRequest) -> None:
            try:
                async for part in self._calls.stream(request, whole, wait_seconds):
                    queue.put_nowait(ChoiceChunk(choice, part))
                queue.put_nowait(None)
            except Exception as error:  # the reader raises it at once, without waiting for the other choices
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
        try:
            num_running = len(tasks)
            while num_running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()


async def first_chunk(chunks: AsyncIterator[ChoiceChunk]) -> ChoiceChunk:
    """Wait for the first chunk; a refused request raises here, before the answer's status is sent."""
    return await anext(chunks)


async def prepend(first: ChoiceChunk, others: AsyncIterator[ChoiceChunk]) -> AsyncIterator[ChoiceChunk]:
    yield first
    async for chunk in others:
        yield chunk


async def with_grammar_option(option: str, chunks: AsyncIterator[ChoiceChunk]) -> AsyncIterator[ChoiceChunk]:
    """Yield the chunks. An error about the grammar gets the name of the option that set the grammar."""
    try:
        async for chunk in chunks:
            yield chunk
    except KVSidecarError as error:
        if error.param == "grammar":
            error.param = option
        raise


# ---- prompt log probabilities that choices share -------------------------------------------------------------------


def request_logprobs_once(requests: list[pb.GenerateRequest], num_choices: int) -> bool:
    """Remove ``prompt_logprobs`` from all requests but the first one of each prompt.

    The ``num_choices`` requests of a prompt must be consecutive. Returns False if there is nothing to share.
    """
    if num_choices == 1 or not requests[0].HasField("prompt_logprobs"):
        return False
    for i, request in enumerate(requests):
        if i % num_choices:
            request.ClearField("prompt_logprobs")
    return True


async def share_prompt_logprobs(chunks: AsyncIterator[ChoiceChunk], num_choices: int) -> AsyncIterator[ChoiceChunk]:
    """Copy the log probabilities of a prompt into the first chunk of each of its choices.

    Only the prompt's first choice gets them from its worker. Chunks of the other choices wait for it.
    """
    found: dict[int, pb.GenerateStreamResponse] = {}  # by the prompt's index
    waiting: dict[int, list[ChoiceChunk]] = {}
    begun: set[int] = set()

    def completed(chunk: ChoiceChunk) -> ChoiceChunk:
        if chunk.choice not in begun:
            begun.add(chunk.choice)
            chunk.part.prompt_logprobs.extend(found[chunk.choice // num_choices].prompt_logprobs)
        return chunk

    async for chunk in chunks:
        prompt, other = divmod(chunk.choice, num_choices)
        if other and prompt not in found:
            waiting.setdefault(prompt, []).append(chunk)
            continue
        if other:
            yield completed(chunk)
            continue
        if prompt not in found:
            # A copy: the writer of the answer may change the chunk.
            found[prompt] = pb.GenerateStreamResponse(prompt_logprobs=chunk.part.prompt_logprobs)
        yield chunk
        for late in waiting.pop(prompt, ()):
            yield completed(late)
