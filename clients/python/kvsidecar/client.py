"""gRPC clients of an inference worker, sync and async.

Both raise ``KVSidecarError``s. A ``deadline`` is in seconds and ends the request at the worker too. If the program uses
OpenTelemetry, calls include the active span as W3C Trace Context.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import grpc

from kvsidecar.errors import Unavailable, from_rpc
from kvsidecar.hint_options import HintOptions
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.net.grpc_server import CLIENT_KEEPALIVE, DIRECT
from kvsidecar.requests import Options, Prompt, add_calls, check_options, to_prompt, to_request, to_warm_request
from kvsidecar.telemetry.tracer import context_metadata
from kvsidecar.worker_targets import RetryState, WorkerChannels

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A worker that was away is found again within a second; by default, gRPC waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    *CLIENT_KEEPALIVE,
    DIRECT,
]


@dataclass(frozen=True)
class Completion:
    """A complete answer.

    Times are in milliseconds since the request's arrival at the worker.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    approximate_tokens: int
    recomputed_tokens: int
    timings: dict[str, float]
    logprobs: list[pb.TokenLogprob] = field(default_factory=list, repr=False)
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prompt_parts: list[pb.PromptPart] = field(default_factory=list, repr=False)
    prompt_text: str = field(default="", repr=False)
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list, repr=False)
    stopped_by: str | int | None = None
    """The request's stop string or stop token that ended the answer."""
    reasoning: str = ""
    """Reasoning before a chat's answer, if the model's template marks reasoning; ``text`` does not include it."""
    miss: pb.MissReason | None = field(default=None, repr=False)
    """With ``explain``: the reason why prompt tokens were computed; None if all tokens but the last were cached."""

    @property
    def ttft_ms(self) -> float:
        return self.timings["ttft_ms"]


@dataclass(frozen=True)
class CompletionChunk:
    """A chunk of a streamed answer; the last chunk has ``final``."""

    text: str
    token_ids: list[int]
    final: Completion | None = None
    tool_calls: list[pb.ToolCallDelta] = field(default_factory=list)
    reasoning: str = ""


_Prompt = pb.GenerateResponse | pb.GenerateStreamResponse  # has the prompt's data; of a stream, the first part
_FINISH = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def timings_dict(timings: pb.Timings) -> dict[str, float]:
    """Return all fields of a Timings message, zeros included."""
    return {f.name: getattr(timings, f.name) for f in timings.DESCRIPTOR.fields}


def _completion(
    response: pb.GenerateResponse | pb.GenerateStreamResponse,
    text: str,
    ids: list[int],
    logprobs: list[pb.TokenLogprob],
    calls: list[pb.ToolCall],
    prompt: _Prompt,
    reasoning: str,
) -> Completion:
    kind = response.WhichOneof("stopped_by")
    return Completion(
        text=text,
        token_ids=ids,
        finish_reason=_FINISH.get(response.finish_reason, ""),
        prompt_tokens=response.usage.prompt_tokens,
        cached_tokens=response.usage.cached_tokens,
        generated_tokens=response.usage.generated_tokens,
        approximate_tokens=response.usage.approximate_tokens,
        recomputed_tokens=response.usage.recomputed_tokens,
        timings=timings_dict(response.timings),
        logprobs=logprobs,
        tool_calls=calls,
        draft_tokens=response.usage.draft_tokens,
        accepted_tokens=response.usage.accepted_tokens,
        prompt_parts=list(prompt.prompt_parts),
        prompt_text=prompt.prompt_text,
        prompt_logprobs=list(prompt.prompt_logprobs),
        stopped_by=None if kind is None else getattr(response, kind),
        reasoning=reasoning,
        miss=response.miss if response.HasField("miss") else None,
    )


def _whole(response: pb.GenerateResponse) -> Completion:
    r = response
    return _completion(r, r.text, list(r.token_ids), list(r.logprobs), list(r.tool_calls), r, r.reasoning)


class Client:
    """Synchronous client of an inference worker.

    Thread-safe. Close it, or use it as a context manager. Without an address it calls the first worker of the local
    node. If a call fails before any output, the client sends the request to another worker.
    """

    def __init__(self, address: str | Path | None = None) -> None:
        self._workers = WorkerChannels(address, lambda target: grpc.insecure_channel(target, options=_OPTIONS))

    @property
    def stub(self) -> Any:
        """The gRPC stub of the current worker."""
        return self._workers.stub

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Running and later calls raise Cancelled."""
        for channel in self._workers.close():
            channel.close()

    def wait_ready(self, seconds: float) -> None:
        """Wait until the worker listens. Raises TimeoutError."""
        try:
            grpc.channel_ready_future(self._workers.channels[self._workers.now]).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            raise TimeoutError(f"no worker answered within {seconds} s") from None

    def generate(self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[Options]) -> Completion:
        """Generate an answer and wait for its end. Options are those of ``to_request``."""
        check_options("generate", options)
        return _whole(self._call("Generate", to_request(prompt, **options), deadline))

    def stream(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[Options]
    ) -> Generator[CompletionChunk, None, None]:
        """Generate an answer as a stream. Closing the iterator cancels the request."""
        check_options("stream", options)
        request = pb.GenerateStreamRequest(request=to_request(prompt, **options))
        tries, gather, begun = RetryState(self._workers, deadline), _StreamAccumulator(), False
        while True:
            call = tries.stub().GenerateStream(request, timeout=tries.left(), metadata=context_metadata())
            try:
                for part in call:
                    begun = True
                    yield gather.add(part)
                return
            except grpc.RpcError as error:
                found = from_rpc(error)
                if begun or not isinstance(found, Unavailable) or not tries.again():
                    raise found from error
            finally:
                call.cancel()

    def warm(
        self,
        prompt: Prompt,
        *,
        deadline: float | None = None,
        tenant_salt: bytes = b"",
        tools: Sequence[Mapping[str, Any]] = (),
        model: str = "",
        prefetch: bool = False,
        **hints: Unpack[HintOptions],
    ) -> pb.WarmResponse:
        """Prefill a prompt into the cache, for an adapter if ``model`` names one.

        With ``prefetch``, stored chunks are loaded into the daemon's memory, and nothing is computed.
        """
        request = to_warm_request(prompt, tools, tenant_salt, model, prefetch=prefetch, **hints)
        response: pb.WarmResponse = self._call("Warm", request, deadline)
        return response

    def release_session(self, cache_session: str, *, tenant_salt: bytes = b"", model: str = "") -> int:
        """Remove the chunks that only this session has used.

        Returns their number, without those that an earlier try removed, whose worker died before it answered.
        """
        request = pb.ReleaseSessionRequest(session=cache_session, tenant_salt=tenant_salt, model=model)
        return int(self._call("ReleaseSession", request, 60).released_chunks)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt."""
        return list(self._call("Tokenize", pb.TokenizeRequest(prompt=to_prompt(prompt)), 30).token_ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self._call("Detokenize", pb.DetokenizeRequest(token_ids=ids), 30).text)

    def model(self) -> pb.GetModelResponse:
        response: pb.GetModelResponse = self._call("GetModel", pb.GetModelRequest(), 10)
        return response

    def stats(self) -> pb.GetStatsResponse:
        response: pb.GetStatsResponse = self._call("GetStats", pb.GetStatsRequest(), 10)
        return response

    def _call(self, method: str, request: Any, deadline: float | None) -> Any:
        tries = RetryState(self._workers, deadline)
        while True:
            try:
                call = getattr(tries.stub(), method)
                return call(request, timeout=tries.left(), metadata=context_metadata())
            except grpc.RpcError as error:
                found = from_rpc(error)
                if not isinstance(found, Unavailable) or not tries.again():
                    raise found from error


class AsyncClient:
    """Asynchronous client for one event loop, otherwise like ``Client``.

    ``options`` are gRPC channel options; they override the client's own.
    """

    def __init__(self, address: str | Path | None = None, options: Sequence[tuple[str, Any]] = ()) -> None:
        merged = list((dict(_OPTIONS) | dict(options)).items())  # of two options with one name, gRPC takes the first
        self._workers = WorkerChannels(address, lambda target: grpc.aio.insecure_channel(target, options=merged))

    @property
    def stub(self) -> Any:
        """The gRPC stub of the current worker."""
        return self._workers.stub

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Running and later calls raise Cancelled."""
        for channel in self._workers.close():
            await channel.close()

    async def generate(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Generate an answer and wait for its end. Options are those of ``to_request``."""
        check_options("generate", options)
        return _whole(await self._call("Generate", to_request(prompt, **options), deadline))

    async def stream(
        self, prompt: Prompt, *, deadline: float | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[CompletionChunk]:
        """Generate an answer as a stream. Closing the iterator cancels the request."""
        check_options("stream", options)
        request = pb.GenerateStreamRequest(request=to_request(prompt, **options))
        tries, gather, begun = RetryState(self._workers, deadline), _StreamAccumulator(), False
        while True:
            call = tries.stub().GenerateStream(request, timeout=tries.left(), metadata=context_metadata())
            try:
                async for part in call:
                    begun = True
                    yield gather.add(part)
                return
            except grpc.RpcError as error:
                found = from_rpc(error)
                if begun or not isinstance(found, Unavailable) or not tries.again():
                    raise found from error
            finally:
                call.cancel()

    async def warm(
        self,
        prompt: Prompt,
        *,
        deadline: float | None = None,
        tenant_salt: bytes = b"",
        tools: Sequence[Mapping[str, Any]] = (),
        model: str = "",
        prefetch: bool = False,
        **hints: Unpack[HintOptions],
    ) -> pb.WarmResponse:
        """Prefill a prompt into the cache, for an adapter if ``model`` names one.

        With ``prefetch``, stored chunks are loaded into the daemon's memory, and nothing is computed.
        """
        request = to_warm_request(prompt, tools, tenant_salt, model, prefetch=prefetch, **hints)
        response: pb.WarmResponse = await self._call("Warm", request, deadline)
        return response

    async def release_session(self, cache_session: str, *, tenant_salt: bytes = b"", model: str = "") -> int:
        """Remove the chunks that only this session has used.

        Returns their number, without those that an earlier try removed, whose worker died before it answered.
        """
        request = pb.ReleaseSessionRequest(session=cache_session, tenant_salt=tenant_salt, model=model)
        return int((await self._call("ReleaseSession", request, 60)).released_chunks)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt."""
        return list((await self._call("Tokenize", pb.TokenizeRequest(prompt=to_prompt(prompt)), 30)).token_ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str((await self._call("Detokenize", pb.DetokenizeRequest(token_ids=ids), 30)).text)

    async def model(self) -> pb.GetModelResponse:
        response: pb.GetModelResponse = await self._call("GetModel", pb.GetModelRequest(), 10)
        return response

    async def stats(self) -> pb.GetStatsResponse:
        response: pb.GetStatsResponse = await self._call("GetStats", pb.GetStatsRequest(), 10)
        return response

    async def _call(self, method: str, request: Any, deadline: float | None) -> Any:
        tries = RetryState(self._workers, deadline)
        while True:
            try:
                call = getattr(tries.stub(), method)
                return await call(request, timeout=tries.left(), metadata=context_metadata())
            except grpc.RpcError as error:
                found = from_rpc(error)
                if not isinstance(found, Unavailable) or not tries.again():
                    raise found from error


class _StreamAccumulator:
    """Accumulates the parts of a stream into a Completion."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self._calls: list[pb.ToolCall] = []
        self._logprobs: list[pb.TokenLogprob] = []
        self._first: pb.GenerateStreamResponse | None = None

    def add(self, part: pb.GenerateStreamResponse) -> CompletionChunk:
        self._text.append(part.text)
        self._reasoning.append(part.reasoning)
        self._ids.extend(part.token_ids)
        add_calls(self._calls, part.tool_calls)
        self._logprobs.extend(part.logprobs)
        if self._first is None:
            self._first = part
        final = None
        if part.finish_reason:
            text, reasoning = "".join(self._text), "".join(self._reasoning)
            final = _completion(part, text, self._ids, self._logprobs, self._calls, self._first, reasoning)
        return CompletionChunk(part.text, list(part.token_ids), final, list(part.tool_calls), part.reasoning)
