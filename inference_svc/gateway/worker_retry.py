"""Calls workers, and retries on another worker before the client has received anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
from kvsidecar.errors import KVSidecarError, Unavailable
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.gateway_metrics import GatewayMetrics
from inference_svc.gateway.http_tracing import FIRST_TOKEN, GENERATE_STREAM, current_span
from inference_svc.gateway.worker_router import Worker, WorkerRouter
from inference_svc.gateway.worker_wait import WorkerWait

# A stopped process keeps its connections open but answers no poll. A request leaves a worker that was down for this
# long.
_SILENT_SECONDS, _LOOK_SECONDS = 3.0, 1.0


class WorkerRetry:
    """Sends the request of one choice to a worker, with retries. Runs on the event loop."""

    def __init__(self, config: GatewayConfig, router: WorkerRouter, metrics: GatewayMetrics, wait: WorkerWait) -> None:
        self._config, self._router, self._metrics, self._wait = config, router, metrics, wait

    async def stream(
        self, request: pb.GenerateRequest, whole: bool, wait_seconds: float | None
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Yield the messages of one choice, from the first worker that completes it.

        If a worker fails before the iterator has yielded a message, the request goes to another worker, or to the same
        worker after its restart. The number of tries is at most the number of workers, but at least two. So a request
        that crashes workers does not crash them again and again. With ``whole``, the messages are yielded only when the
        choice is complete.
        """
        tried: list[str] = []
        timer, max_tries = self._metrics.answer(), max(2, len(self._router.workers))
        while True:
            excluded = set(tried) if len(tried) < len(self._router.workers) else set()
            worker = await self._wait.pick(request, excluded, wait_seconds)
            tried.append(worker.target)
            buffered: list[pb.GenerateStreamResponse] = []
            try:
                async for part in self._call(worker, request):
                    if not timer.started:
                        current_span().event(FIRST_TOKEN)
                    timer.add(worker.model.model_id, part)
                    if whole:
                        buffered.append(part)
                    else:
                        yield part
                for part in buffered:
                    yield part
                return
            except KVSidecarError as error:
                if not is_retryable(error):
                    raise
                worker.down(str(error))
                if timer.started and not whole:
                    raise Unavailable("the worker broke off its answer; send the request again") from error
                if len(tried) == max_tries:
                    raise Unavailable(
                        f"{max_tries} workers went away while they had this request; try again"
                    ) from error
                self._metrics.retries.inc()

    async def _call(self, worker: Worker, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateStreamResponse]:
        worker.in_flight += 1
        with current_span().call(GENERATE_STREAM) as span:
            call = worker.client.stub.GenerateStream(
                pb.GenerateStreamRequest(request=request),
                timeout=self._config.request_seconds,
                metadata=span.metadata(),
            )
            parts = aiter(call)
            try:
                yield await self._first(worker, request.model, parts)
                async for part in parts:
                    yield part
            except StopAsyncIteration:
                raise Unavailable("the worker ended its answer without a message") from None
            except grpc.RpcError as error:
                raise worker.error_of(error) from error
            finally:
                call.cancel()
                worker.in_flight -= 1

    async def _first(
        self, worker: Worker, model: str, parts: AsyncIterator[pb.GenerateStreamResponse]
    ) -> pb.GenerateStreamResponse:
        """Return the first message of a call.

        Raises Unavailable if the worker stays silent while another worker that serves the model is up. Raises
        StopAsyncIteration if the call ends without a message.
        """
        first = asyncio.ensure_future(anext(parts))
        try:
            while not (await asyncio.wait({first}, timeout=_LOOK_SECONDS))[0]:
                silent = not worker.alive and time.monotonic() - worker.down_at > _SILENT_SECONDS
                if silent and any(w.alive and w.serves(model) for w in self._router.workers):
                    raise Unavailable("the worker does not answer")
            return first.result()
        finally:
            first.cancel()


def is_retryable(error: KVSidecarError) -> bool:
    """Return whether a retry on another worker may succeed."""
    return isinstance(error, Unavailable)
