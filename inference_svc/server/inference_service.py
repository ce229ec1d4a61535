"""gRPC servicer of InferenceService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import Message
from kvsidecar import keys
from kvsidecar.errors import (
    INFERENCE_DOMAIN,
    FailedPrecondition,
    InvalidRequest,
    KVSidecarError,
    Unavailable,
    abort,
    unary,
)
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceServicer
from kvsidecar.process.malloc_tuning import trim_freed_memory
from kvsidecar.requests import add_calls
from kvsidecar.retained_prefixes import RetainedPrefixes

from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.request.miss_place import add_place
from inference_svc.request.miss_report import MissReporter
from inference_svc.request.prompt_provenance import numerics_of, prompt_parts
from inference_svc.request.request_builder import TokenizedRequest
from inference_svc.request.request_options import check_salt, check_session
from inference_svc.request.response_fields import (
    add_usage,
    copy_stop_reason,
    generated_logprobs,
    join_parts,
    prompt_logprobs,
    set_stop_reason,
    split_reasoning,
)
from inference_svc.sequence.sequence import Sequence, SequenceOutput
from inference_svc.server.lora_admin import LoraAdmin
from inference_svc.server.otel_observer import NOOP, NOOP_REQUEST, ObservedRequest, RequestObserver
from inference_svc.server.output_queue import OutputQueue
from inference_svc.server.runtime import Runtime
from inference_svc.server.worker_stats import worker_stats
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.tool_calls.call_response import FINISH, read_calls

log = structlog.get_logger("worker")
T = TypeVar("T")
# After a larger request, the worker returns freed memory of the tokenization to the system.
_LARGE_BYTES = 1 << 18
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(InferenceServiceServicer):
    """Servicer of one worker. Methods run on the worker's event loop, the engine on its own thread."""

    def __init__(self, runtime: Runtime, observer: RequestObserver = NOOP) -> None:
        self._runtime, self._engine, self._observer = runtime, runtime.engine, observer
        self._loaded = runtime.engine.loaded
        self._requests = runtime.request_builder()
        self._tokenizer = self._requests.tokenizer
        self._requests.warm_up()
        self._adapters = LoraAdmin(runtime)
        self._misses = MissReporter(runtime.reuse_state)
        self._loop = asyncio.get_running_loop()
        # Templates and tokenizers take seconds for a long prompt, and would block the event loop's streams.
        self._tokenize_threads = ThreadPoolExecutor(2, "tokenize")
        # Grammars may take seconds as well. On separate threads, they delay only requests with a grammar.
        self._grammar_threads = ThreadPoolExecutor(2, "compile")

    # ---- generating -----------------------------------------------------------------------------------------

    @unary(INFERENCE_DOMAIN)
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        _check_explain(request, context)
        response = pb.GenerateResponse()
        texts, reasoning = list[str](), list[str]()
        async for part in self._generate(request, self._observer.request("Generate", context, request.prompt)):
            texts.append(part.text)
            reasoning.append(part.reasoning)
            response.token_ids.extend(part.token_ids)
            response.logprobs.extend(part.logprobs)
            add_calls(response.tool_calls, part.tool_calls)
            response.prompt_parts.extend(part.prompt_parts)
            response.prompt_logprobs.extend(part.prompt_logprobs)
            response.prompt_token_ids.extend(part.prompt_token_ids)
            response.prompt_text = response.prompt_text or part.prompt_text
            if part.HasField("numerics"):
                response.numerics.CopyFrom(part.numerics)
                response.reuse_anywhere.CopyFrom(part.reuse_anywhere)
            if part.finish_reason:
                copy_stop_reason(part, response)
                response.finish_reason = part.finish_reason
                response.usage.CopyFrom(part.usage)
                if part.HasField("miss"):
                    response.miss.CopyFrom(part.miss)
                response.timings.CopyFrom(part.timings)
            response.request_id = part.request_id or response.request_id
        response.text, response.reasoning = "".join(texts), "".join(reasoning)
        return response

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        _check_explain(request.request, context)
        try:
            seen = self._observer.request("GenerateStream", context, request.request.prompt)
            async for part in self._generate(request.request, seen):
                yield part
        except KVSidecarError as error:
            await abort(context, error, INFERENCE_DOMAIN)

    async def _generate(
        self, request: pb.GenerateRequest, seen: ObservedRequest = NOOP_REQUEST
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Yield the parts of an answer. Closing the generator early cancels the sequence."""
        calls, thinking, first, sent, texts, message = None, None, True, 0, list[str](), pb.ChatMessage()
        async with aclosing(self.outputs(request, seen)) as groups:
            async for sequence, outputs in groups:
                if first:
                    calls = self._requests.call_parser(request)
                    thinking = self._requests.reasoning_splitter(request, sequence)
                parts = list[pb.GenerateStreamResponse]()
                for output in outputs:
                    part = self._part(sequence, output)
                    if thinking is not None:
                        split_reasoning(thinking, part)
                    if calls is None:
                        parts.append(part)
                        continue
                    for one in read_calls(calls, part):
                        parts.append(one)
                        texts.append(one.text)
                        add_calls(message.tool_calls, one.tool_calls)
                        # The answer's tokens may include a stop string, an excess call or reasoning that ``message``
                        # lacks. The tokens of such answers are not kept.
                        called = one.finish_reason == pb.FINISH_REASON_TOOL_CALLS and not one.WhichOneof("stopped_by")
                        reasoned = thinking is not None and thinking.tokens > 0
                        if called and not reasoned and calls.calls == len(message.tool_calls):
                            message.content = "".join(texts)
                            self._tokenizer.keep_calls(request.cache.tenant_salt, sequence, message)
                for whole in join_parts(parts):
                    sent += len(whole.token_ids)
                    if request.continuous_usage or whole.finish_reason:
                        add_usage(sequence, whole, sent, thinking.tokens if thinking is not None else 0)
                    if first:
                        whole.request_id = sequence.request.id
                    if first and request.return_prompt_tokens:
                        whole.prompt_token_ids.extend(sequence.tokens[: sequence.request.num_prompt_tokens])
                    if first and (request.explain or request.echo or sequence.request.num_prompt_logprobs is not None):
                        await self._tokenize_beside(request, partial(self._add_prompt_fields, request, sequence, whole))
                    if whole.finish_reason:
                        await self._add_miss(request, sequence, whole)
                    first = False
                    yield whole

    async def outputs(
        self, request: pb.GenerateRequest, seen: ObservedRequest = NOOP_REQUEST
    ) -> AsyncGenerator[tuple[Sequence, list[SequenceOutput]], None]:
        """Yield the engine's outputs for a request: those that arrive together, in order.

        Closing the generator early cancels the sequence.
        """
        with seen:
            sequence, queue = await self._submit(request, seen)
            finished = False
            try:
                while not finished:
                    group = list[SequenceOutput]()
                    for output in await queue.get():
                        finished = output.finish is not None
                        if output.error is not None:
                            if group:
                                yield sequence, group
                            raise output.error
                        group.append(output)
                        if finished:  # the next output would be that of the stored tokens
                            seen.answered(sequence)
                            break
                    yield sequence, group
            finally:
                if not finished:
                    self._engine.cancel(sequence)

    async def _submit(self, request: pb.GenerateRequest, seen: ObservedRequest) -> tuple[Sequence, OutputQueue]:
        arrived, outputs = time.perf_counter(), OutputQueue(self._runtime.config.stream_interval)
        tokenized = await self._tokenize_beside(request, lambda: self._requests.tokenize(request, outputs.put, arrived))
        sequence = tokenized.sequence(await self._grammar_state(request, tokenized))
        prepared, sequence.trace = time.perf_counter(), seen.span
        sequence.timings.tokenize_ms = (prepared - arrived) * 1e3
        seen.span.phase("tokenize", arrived, prepared)
        self._engine.submit(sequence)
        return sequence, outputs

    async def _grammar_state(self, request: pb.GenerateRequest, tokenized: TokenizedRequest) -> GrammarState | None:
        """Compile the request's grammar; on a thread if the request may have a grammar."""
        if not (request.HasField("grammar") or request.prompt.chat.tools or request.tool_use.mode):
            return self._requests.grammar_state(request, tokenized)
        return await self._loop.run_in_executor(self._grammar_threads, self._requests.grammar_state, request, tokenized)

    async def _tokenize_beside(self, request: Message, work: Callable[[], T]) -> T:
        """Run ``work`` on a tokenizer thread, because it may take long for a large request."""

        def read() -> T:
            try:
                return work()
            finally:
                if request.ByteSize() > _LARGE_BYTES:
                    trim_freed_memory()

        return await self._loop.run_in_executor(self._tokenize_threads, read)

    def _add_prompt_fields(
        self, request: pb.GenerateRequest, sequence: Sequence, part: pb.GenerateStreamResponse
    ) -> None:
        """Add the requested fields about the prompt to the first part."""
        if sequence.usage.provenance:
            part.prompt_parts.extend(prompt_parts(sequence, self._tokenizer.text))
        if request.explain:
            part.numerics.CopyFrom(numerics_of(self._loaded))
            part.reuse_anywhere.CopyFrom(self._runtime.reuse_state().message())
        part.prompt_logprobs.extend(prompt_logprobs(sequence, self._tokenizer.text_and_bytes))
        if request.echo:
            part.prompt_text = self._requests.prompt_text(request, sequence)
            offsets = self._tokenizer.text_offsets(sequence.tokens[: len(part.prompt_logprobs)], part.prompt_text)
            for found, offset in zip(part.prompt_logprobs, offsets, strict=True):
                found.text_offset = offset

    async def _add_miss(self, request: pb.GenerateRequest, sequence: Sequence, part: pb.GenerateStreamResponse) -> None:
        await self._misses.add(sequence, part, wait=request.explain)
        if request.explain and part.HasField("miss"):
            tokens = sequence.tokens[: sequence.request.num_prompt_tokens]
            template = self._requests.chat_template
            work = partial(add_place, part.miss, request.prompt, tokens, self._tokenizer.text, template)
            await self._tokenize_beside(request, work)

    def _part(self, sequence: Sequence, output: SequenceOutput) -> pb.GenerateStreamResponse:
        part = pb.GenerateStreamResponse(text=output.text)
        if output.token is not None:
            part.token_ids.append(output.token.token)
            part.logprobs.extend(generated_logprobs(output, self._tokenizer.text_and_bytes))
        if output.finish is not None:
            part.finish_reason = FINISH[output.finish]
            set_stop_reason(sequence, output.finish, part)
            for name, value in vars(sequence.timings).items():
                setattr(part.timings, name, value)
        return part

    @unary(INFERENCE_DOMAIN)
    async def Warm(self, request: pb.WarmRequest, context: Context) -> pb.WarmResponse:
        self._requests.adapter(request.model)  # refuses an unknown name before the prompt is tokenized
        with self._observer.request("Warm", context) as seen:
            tokens, marks, retained = await self._tokenize_beside(request, partial(self._warm_prompt, request))
            inner = pb.GenerateRequest(
                prompt=pb.Prompt(token_ids=pb.TokenIds(ids=tokens)),
                max_tokens=1,
                cache=request.cache,
                model=request.model,
            )
            inner.cache.segment_ends[:] = marks.segment_ends
            del inner.cache.breakpoints[:]
            inner.cache.breakpoints.extend(pb.CacheBreakpoint(tokens=end, retain_seconds=s) for end, s in retained)
            if request.prefetch:
                return await self._prefetch(inner)
            sequence, outputs = await self._submit(inner, seen)
            output = SequenceOutput()
            try:
                while output.stored_tokens is None:
                    for output in await outputs.get():
                        if output.error is not None:
                            raise output.error
            finally:
                if output.stored_tokens is None:
                    self._engine.cancel(sequence)
            return pb.WarmResponse(
                prompt_tokens=len(tokens), cached_tokens=sequence.usage.num_cached, stored_tokens=output.stored_tokens
            )

    def _warm_prompt(self, request: pb.WarmRequest) -> tuple[list[int], DocumentMarks, RetainedPrefixes]:
        tokens, marks = self._tokenizer.checked_tokens(request.prompt, generation_prompt=False, cache=request.cache)
        return tokens, marks, self._requests.breakpoints.find(request.prompt, request.cache, len(tokens))

    async def _prefetch(self, request: pb.GenerateRequest) -> pb.WarmResponse:
        work = partial(self._requests.tokenize, request, lambda _: None, time.perf_counter())
        sequence = (await self._tokenize_beside(request, work)).sequence(None)
        cache, tokens = self._runtime.cache, sequence.request.num_prompt_tokens
        found = await asyncio.to_thread(cache.prefetch, sequence) if cache is not None else 0
        return pb.WarmResponse(prompt_tokens=tokens, cached_tokens=found, stored_tokens=found)

    @unary(INFERENCE_DOMAIN)
    async def ReleaseSession(self, request: pb.ReleaseSessionRequest, context: Context) -> pb.ReleaseSessionResponse:
        adapter, cache = self._requests.adapter(request.model), self._runtime.cache
        if not check_session(request.session):
            raise InvalidRequest("the session has no name; name the one to release", param="session")
        check_salt(request.tenant_salt)
        if cache is None:
            return pb.ReleaseSessionResponse()
        fingerprint = b"" if adapter is None else adapter.fingerprint
        released = await asyncio.to_thread(cache.release_session, fingerprint, request.tenant_salt, request.session)
        return pb.ReleaseSessionResponse(released_chunks=released)

    # ---- tokens ---------------------------------------------------------------------------------------------

    @unary(INFERENCE_DOMAIN)
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return await self._tokenize_beside(request, lambda: self._tokenizer.tokenize(request))

    @unary(INFERENCE_DOMAIN)
    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> pb.GetTokenizerResponse:
        return pb.GetTokenizerResponse(config_json=self._tokenizer.config())

    @unary(INFERENCE_DOMAIN)
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        if len(request.token_ids) > (most := self._tokenizer.max_ids):
            raise InvalidRequest(f"there are {len(request.token_ids)} token_ids; at most {most} are allowed")
        return await self._tokenize_beside(request, lambda: self._detokenized(request))

    def _detokenized(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        wrong = next((i for i in request.token_ids if i >= self._loaded.config.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {self._loaded.config.vocab_size}")
        return pb.DetokenizeResponse(text=self._tokenizer.text(list(request.token_ids)))

    # ---- state ----------------------------------------------------------------------------------------------

    @unary(INFERENCE_DOMAIN)
    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        if ailment := self._engine.ailment:  # gateways send requests only to workers that answer this call
            raise Unavailable(ailment)
        m = self._loaded
        return pb.GetModelResponse(
            model_id=m.id,
            architecture=m.architecture,
            context_length=self._engine.context_length,
            namespace=self._namespace(b""),
            dtype=str(m.dtype).removeprefix("torch."),
            device=str(m.device),
            storage_bits=self._runtime.config.storage_bits,
            vocab_size=m.config.vocab_size,
            has_chat_template=bool(m.tokenizer.chat_template),
            adapters=[self._adapter_message(adapter) for adapter in list(self._engine.adapters.values())],
            numerics=numerics_of(m),
            reuse_anywhere=self._runtime.reuse_state().message(),
        )

    def _namespace(self, fingerprint: bytes) -> bytes:
        return keys.namespace_id(self._loaded.descriptor(self._runtime.config.storage_bits, fingerprint))

    def _adapter_message(self, adapter: LoraAdapter) -> pb.Adapter:
        return pb.Adapter(
            name=adapter.name, namespace=self._namespace(adapter.fingerprint), size_bytes=adapter.size_bytes
        )

    # ---- adapters -------------------------------------------------------------------------------------------

    @unary(INFERENCE_DOMAIN)
    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        _require_unix_socket(context)
        work = partial(self._adapters.load, request.name, request.path, request.namespace)
        return pb.LoadAdapterResponse(adapter=self._adapter_message(await asyncio.to_thread(work)))

    @unary(INFERENCE_DOMAIN)
    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        _require_unix_socket(context)
        await asyncio.to_thread(self._adapters.unload, request.name)
        return pb.UnloadAdapterResponse()

    @unary(INFERENCE_DOMAIN)
    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        return worker_stats(self._runtime)


def _check_explain(request: pb.GenerateRequest, context: Context) -> None:
    """Allow miss reasons that name other tenants only at the Unix socket.

    The gateway calls at this socket, and allows them only to operators.
    """
    if request.explain_across_tenants and not context.peer().startswith("unix"):
        request.explain_across_tenants = False


def _require_unix_socket(context: Context) -> None:
    """Refuse callers over TCP: only the worker's user can connect to its Unix socket."""
    if not context.peer().startswith("unix"):
        raise FailedPrecondition("adapters come and go at the worker's Unix socket only")
