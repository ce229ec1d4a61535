"""gRPC servicer of ``vllm.grpc.engine.VllmEngine``, implemented with the worker's service."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import grpc
from kvsidecar import __version__, keys
from kvsidecar.errors import INFERENCE_DOMAIN, FailedPrecondition, KVSidecarError, LimitExceeded, abort
from kvsidecar.inference.v1 import inference_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.sampling.sampling_params import valid_defaults
from inference_svc.sequence.sequence import Sequence, SequenceOutput
from inference_svc.server.daemon_address import daemon_address
from inference_svc.server.inference_service import InferenceService
from inference_svc.server.otel_observer import RequestObserver
from inference_svc.server.runtime import Runtime
from inference_svc.server.vllm_grpc.tokenizer_zip import zip_tokenizer
from inference_svc.server.vllm_grpc.vllm_kv_events import kv_event_batches
from inference_svc.server.vllm_grpc.vllm_request import to_requests
from inference_svc.server.vllm_grpc.vllm_response import VllmResponse
from inference_svc.server.worker_stats import worker_stats

SERVICE: str = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name
_PIECE_BYTES, _MAX_SUBSCRIBERS = 64 << 10, 8
Context = grpc.aio.ServicerContext[Any, Any]


class _Aborted(Exception):
    """A client called ``Abort`` for the request."""


Event = tuple[VllmResponse, Sequence, SequenceOutput] | Exception


class VllmEngine(VllmEngineServicer):
    """Servicer of one worker. All methods run on the service's event loop."""

    def __init__(
        self, service: InferenceService, runtime: Runtime, observer: RequestObserver, stop: asyncio.Event
    ) -> None:
        """``stop`` is set when the worker shuts down, and ends event subscriptions."""
        self._stop, self._subscribers = stop, 0
        self._service, self._runtime, self._observer = service, runtime, observer
        self._engine, self._loaded = runtime.engine, runtime.engine.loaded
        self._began, self._asked_at = time.time(), 0.0
        self._running: dict[str, set[asyncio.Queue[Event]]] = {}  # by the client's request id
        self._zipped: asyncio.Future[bytes] | None = None

    # ---- generating -----------------------------------------------------------------------------------------

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> AsyncIterator[vllm.GenerateResponse]:
        self._asked_at = time.time()
        try:
            asked = to_requests(request, self._engine.context_length)
            answers = [VllmResponse(i) for i in range(len(asked))]
            left = set(answers)
            try:
                async with aclosing(self._events(asked, answers, context)) as events:
                    async for answer, sequence, output in events:
                        piece = answer.take(sequence, output)
                        if request.stream and piece is not None:
                            yield piece
                        if output.finish is not None:
                            left.discard(answer)
                            yield answer.ended(output.finish)
            except _Aborted:
                for answer in answers:
                    if answer in left:
                        yield answer.aborted()
        except KVSidecarError as error:
            await abort(context, error, INFERENCE_DOMAIN)

    async def _events(
        self, asked: list[pb.GenerateRequest], answers: list[VllmResponse], context: Context
    ) -> AsyncGenerator[tuple[VllmResponse, Sequence, SequenceOutput], None]:
        """Yield the engine's outputs for all answers as they arrive. Closing the generator early cancels the requests.

        Raises _Aborted when ``Abort`` names the request.
        """
        events: asyncio.Queue[Event] = asyncio.Queue()

        async def follow(answer: VllmResponse, request: pb.GenerateRequest) -> None:
            try:
                seen = self._observer.request("Generate", context, request.prompt, SERVICE)
                async with aclosing(self._service.outputs(request, seen)) as groups:
                    async for sequence, outputs in groups:
                        for output in outputs:
                            events.put_nowait((answer, sequence, output))
            except Exception as error:
                events.put_nowait(error)

        name, left = asked[0].request_id, len(asked)
        if name:
            self._running.setdefault(name, set()).add(events)
        tasks = [asyncio.create_task(follow(*one)) for one in zip(answers, asked, strict=True)]
        try:
            while left:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                left -= event[2].finish is not None
                yield event
        finally:
            for task in tasks:
                task.cancel()
            if name:
                self._running[name].discard(events)
                if not self._running[name]:
                    del self._running[name]
            await asyncio.gather(*tasks, return_exceptions=True)

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Cancel requests by id; unknown ids are ignored."""
        for name in request.request_ids:
            for events in self._running.get(name, ()):
                events.put_nowait(_Aborted())
        return vllm.AbortResponse()

    # ---- state ----------------------------------------------------------------------------------------------

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        ailment = self._engine.ailment
        return vllm.HealthCheckResponse(healthy=not ailment, message=ailment or "serving")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        loaded, tokenizer = self._loaded, self._loaded.tokenizer
        defaults = valid_defaults(loaded.sampling)
        return vllm.GetModelInfoResponse(
            model_path=loaded.id,
            is_generation=True,
            max_context_length=self._engine.context_length,
            vocab_size=loaded.config.vocab_size,
            served_model_name=loaded.id,
            tokenizer_path=tokenizer.name_or_path,
            model_type=loaded.config.model_type,
            architectures=[loaded.architecture],
            eos_token_ids=sorted(loaded.stop_tokens),
            pad_token_id=tokenizer.pad_token_id or 0,
            bos_token_id=tokenizer.bos_token_id or 0,
            max_req_input_len=self._engine.context_length,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        running, waiting, _ = self._engine.load
        return vllm.GetServerInfoResponse(
            active_requests=running + waiting,
            last_receive_timestamp=self._asked_at,
            uptime_seconds=time.time() - self._began,
            server_type="kvsidecar",
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=PAGE_TOKENS,
            model_dtype=str(self._loaded.dtype),
            max_num_seqs=self._runtime.config.batch_sequences,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        stats = worker_stats(self._runtime)
        used = stats.pool_pages - stats.pool_free_pages
        share = used / max(1, stats.pool_pages)
        load = vllm.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=used * PAGE_TOKENS,
            max_total_num_tokens=stats.pool_pages * PAGE_TOKENS,
            token_usage=share,
            cache_hit_rate=stats.cached_tokens / max(1, stats.prompt_tokens - stats.skipping_tokens),
            utilization=share,
            max_running_requests=self._runtime.config.batch_sequences,
        )
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[load])

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        if self._zipped is None or (self._zipped.done() and self._zipped.exception()):
            folder = Path(self._loaded.tokenizer.name_or_path)
            self._zipped = asyncio.ensure_future(asyncio.to_thread(zip_tokenizer, folder))
        try:
            data = await asyncio.shield(self._zipped)
        except FailedPrecondition as error:
            await abort(context, error, INFERENCE_DOMAIN)
        for at in range(0, len(data), _PIECE_BYTES):
            last = at + _PIECE_BYTES >= len(data)
            digest = hashlib.sha256(data).hexdigest() if last else ""
            yield common.GetTokenizerChunk(data=data[at : at + _PIECE_BYTES], sha256=digest)

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common.KvEventBatch]:
        """Stream events of the daemon's stored blocks: first ``cleared``, then all blocks, then changes.

        Every subscription starts with ``cleared`` and all blocks, even after a reconnect.
        """
        address = daemon_address(self._runtime.config)
        if address is None:
            await _refuse(context, "this worker has no cache daemon, whose KV events they would be")
        if self._subscribers >= _MAX_SUBSCRIBERS:
            await abort(context, LimitExceeded(f"{_MAX_SUBSCRIBERS} routers follow events already"), INFERENCE_DOMAIN)
        self._subscribers += 1
        namespace = keys.namespace_id(self._loaded.descriptor(self._runtime.config.storage_bits, b""))
        try:
            after = request.start_sequence_number
            async with aclosing(kv_event_batches(address, namespace, after, self._stop)) as batches:
                async for batch in batches:
                    yield batch
        except KVSidecarError as error:
            await abort(context, error, INFERENCE_DOMAIN)
        finally:
            self._subscribers -= 1

    # ---- unsupported calls ----------------------------------------------------------------------------------

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        await _refuse(context, "this server generates text and embeds nothing; send it to an embedding model's server")

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        await _refuse(context, "the cache is the node's, not this worker's; delete there: kvsidecar cache delete")

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> common.ProfileResponse:
        await _refuse(context, "this server has no profiler to be started by a call; its metrics and traces tell times")

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> common.ProfileResponse:
        await self.StartProfile(common.StartProfileRequest(), context)


async def _refuse(context: Context, sentence: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, sentence)
    raise AssertionError("abort returned")
