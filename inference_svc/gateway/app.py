"""The HTTP application: /v1/models, /v1/chat/completions, /v1/completions, /health, /metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import grpc
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from kvsidecar.errors import InvalidRequest, KVSidecarError, UnknownModel, from_rpc, status_of
from kvsidecar.inference.v1 import inference_pb2 as pb
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.gateway import answers
from inference_svc.gateway.config import GatewayConfig
from inference_svc.gateway.router import Router, Worker, retryable
from inference_svc.gateway.schema import MAX_ANSWERS, ChatRequest, CompletionRequest, parse

log = structlog.get_logger("gateway")


@dataclass(frozen=True)
class Piece:
    """A piece of one choice of an answer."""

    choice: int
    part: pb.GenerateStreamResponse


class Metrics:
    """The gateway's own metrics; workers and daemon have theirs."""

    def __init__(self, router: Router) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("kvsidecar_gateway_requests", "HTTP requests", ["path", "code"], registry=self.registry)
        self.ttft = Histogram(
            "kvsidecar_gateway_ttft_seconds",
            "From arrival to the first token",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.prompt_tokens = Counter("kvsidecar_gateway_prompt_tokens", "Prompt tokens", registry=self.registry)
        self.cached_tokens = Counter(
            "kvsidecar_gateway_cached_tokens", "Prompt tokens from the cache", registry=self.registry
        )
        self.retries = Counter("kvsidecar_gateway_retries", "Requests sent to a second worker", registry=self.registry)
        up = Gauge("kvsidecar_gateway_workers_up", "Workers that answer", registry=self.registry)
        up.set_function(lambda: sum(w.alive for w in router.workers))


def error_response(error: KVSidecarError) -> JSONResponse:
    """An error in OpenAI's format."""
    _, code = status_of(error)
    kind = "invalid_request_error" if code < 500 else "server_error"
    body = {"error": {"message": str(error), "type": kind, "param": None, "code": error.reason.lower()}}
    return JSONResponse(body, status_code=code)


class Gateway:
    """The handlers. One instance per process."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.router = Router(config.targets)
        self.metrics = Metrics(self.router)

    # ---- endpoints ------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        served = {w.model.model_id: w.model for w in self.router.alive}
        data = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "kvsidecar",
                "context_length": m.context_length,
            }
            for name, m in served.items()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        up = [w.target for w in self.router.workers if w.alive]
        body = {"status": "ok" if up else "no worker is up", "workers_up": len(up), "workers": len(self.router.workers)}
        return JSONResponse(body, status_code=200 if up else 503)

    async def show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def chat(self, request: Request) -> Response:
        parsed = parse(ChatRequest, await self._body(request))
        return await self._answer(request, parsed, chat=True)

    async def complete(self, request: Request) -> Response:
        parsed = parse(CompletionRequest, await self._body(request))
        return await self._answer(request, parsed, chat=False)

    # ---- answering ------------------------------------------------------------------------------------------

    async def _body(self, request: Request) -> Any:
        size, parts = 0, []
        async for part in request.stream():
            size += len(part)
            if size > self._config.max_body_bytes:
                raise InvalidRequest(f"the body is larger than the {self._config.max_body_bytes} bytes allowed")
            parts.append(part)
        try:
            return json.loads(b"".join(parts).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"the body is not UTF-8: byte {error.start} is {error.object[error.start]:#x}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}") from error

    async def _answer(self, request: Request, parsed: ChatRequest | CompletionRequest, chat: bool) -> Response:
        self._check_model(parsed.model)
        answer_id = ("chatcmpl-" if chat else "cmpl-") + token_hex(12)
        prompts = parsed.prompts()
        if len(prompts) * parsed.choices > MAX_ANSWERS:
            raise InvalidRequest(
                f"prompt has {len(prompts)} prompts with n = {parsed.choices} answers each; at most {MAX_ANSWERS} "
                f"answers are allowed"
            )
        requests = [
            parsed.to_grpc(prompt, choice, f"{answer_id}-{i}-{choice}")
            for i, prompt in enumerate(prompts)
            for choice in range(parsed.choices)
        ]
        model = parsed.model or next((w.model.model_id for w in self.router.workers if w.alive), "")
        writer = _Writer(answer_id, model, chat, parsed)
        pieces = self._merge(requests)
        if parsed.stream:
            # The first piece is awaited here, so that a refused request gets its status code.
            first = await anext(pieces)
            return StreamingResponse(
                writer.stream(first, pieces),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        return await self._whole(request, writer, pieces, len(requests))

    async def _whole(self, request: Request, writer: _Writer, pieces: AsyncIterator[Piece], count: int) -> Response:
        async def gather() -> dict[str, Any]:
            return await writer.whole(pieces, count)

        work = asyncio.create_task(gather())
        while not work.done():
            await asyncio.wait({work}, timeout=0.25)
            if not work.done() and await request.is_disconnected():
                work.cancel()
                return Response(status_code=499)
        return JSONResponse(work.result())

    def _check_model(self, name: str) -> None:
        served = {w.model.model_id for w in self.router.workers if w.alive}
        if name and served and name not in served:
            raise UnknownModel(f"the model {name!r} is not served here; served: {', '.join(sorted(served))}")

    async def _merge(self, requests: list[pb.GenerateRequest]) -> AsyncIterator[Piece]:
        """The pieces of all choices as they come. Ending early cancels all of them."""
        if len(requests) == 1:
            async for part in self._run(requests[0]):
                yield Piece(0, part)
            return
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

        async def pump(choice: int, request: pb.GenerateRequest) -> None:
            try:
                async for part in self._run(request):
                    queue.put_nowait(Piece(choice, part))
                queue.put_nowait(None)
            except KVSidecarError as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(i, r)) for i, r in enumerate(requests)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateStreamResponse]:
        """One choice. Until its first piece, a worker that goes away is replaced by another."""
        tried: set[str] = set()
        began = time.perf_counter()
        while True:
            worker = self.router.pick(request, tried)
            tried.add(worker.target)
            started = False
            try:
                async for part in self._call(worker, request):
                    if not started:
                        started = True
                        self.metrics.ttft.observe(time.perf_counter() - began)
                    if part.finish_reason:
                        self.metrics.prompt_tokens.inc(part.usage.prompt_tokens)
                        self.metrics.cached_tokens.inc(part.usage.cached_tokens)
                    yield part
                return
            except KVSidecarError as error:
                if not retryable(error):
                    raise
                worker.down(str(error))
                if started or len(tried) == len(self.router.workers):
                    raise
                self.metrics.retries.inc()

    async def _call(self, worker: Worker, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateStreamResponse]:
        worker.in_flight += 1
        call = worker.client.stub.GenerateStream(
            pb.GenerateStreamRequest(request=request), timeout=self._config.request_seconds
        )
        try:
            async for part in call:
                yield part
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        finally:
            call.cancel()
            worker.in_flight -= 1


class _Writer:
    """Writes one answer, whole or as events."""

    def __init__(self, answer_id: str, model: str, chat: bool, request: ChatRequest | CompletionRequest) -> None:
        self._chat, self._request = chat, request
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._whole_kind, self._chunk_kind = kind, f"{kind}.chunk" if chat else kind

    async def whole(self, pieces: AsyncIterator[Piece], count: int) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in range(count)]
        logprobs: list[list[pb.TokenLogprob]] = [[] for _ in range(count)]
        last: dict[int, pb.GenerateStreamResponse] = {}
        async for piece in pieces:
            texts[piece.choice].append(piece.part.text)
            logprobs[piece.choice].extend(piece.part.logprobs)
            last[piece.choice] = piece.part
        choices = []
        for i in range(count):
            text = "".join(texts[i])
            body: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(
                {
                    "index": i,
                    **(body if self._chat else {"text": text}),
                    "logprobs": self._logprobs(logprobs[i]),
                    "finish_reason": answers.finish_reason(last[i].finish_reason),
                }
            )
        return {
            **self._head,
            "object": self._whole_kind,
            "choices": choices,
            "usage": answers.usage([last[i].usage for i in range(count)], self._request.choices),
            "timings": answers.timings(last[0].timings),
        }

    async def stream(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        opened: set[int] = set()
        last: dict[int, pb.GenerateStreamResponse] = {}
        try:
            for event in self._events(first, opened, last):
                yield event
            async for piece in pieces:
                for event in self._events(piece, opened, last):
                    yield event
        except KVSidecarError as error:
            yield answers.event(json.loads(bytes(error_response(error).body)))
            return
        options = self._request.stream_options
        if options is not None and options.include_usage:
            usage = answers.usage([last[i].usage for i in sorted(last)], self._request.choices)
            head = {**self._head, "object": self._chunk_kind, "choices": []}
            yield answers.event({**head, "usage": usage, "timings": answers.timings(last[0].timings)})
        yield answers.event("[DONE]")

    def _events(self, piece: Piece, opened: set[int], last: dict[int, pb.GenerateStreamResponse]) -> list[bytes]:
        part, out = piece.part, []
        if self._chat and piece.choice not in opened:
            out.append(self._chunk(piece.choice, {"delta": {"role": "assistant", "content": ""}}, None))
        opened.add(piece.choice)
        if part.text or part.logprobs:
            content: dict[str, Any] = {"delta": {"content": part.text}} if self._chat else {"text": part.text}
            out.append(self._chunk(piece.choice, {**content, "logprobs": self._logprobs(list(part.logprobs))}, None))
        if part.finish_reason:
            last[piece.choice] = part
            empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            out.append(self._chunk(piece.choice, empty, answers.finish_reason(part.finish_reason)))
        return out

    def _chunk(self, choice: int, content: dict[str, Any], finish: str | None) -> bytes:
        body = {"index": choice, "logprobs": None, **content, "finish_reason": finish}
        return answers.event({**self._head, "object": self._chunk_kind, "choices": [body]})

    def _logprobs(self, parts: list[pb.TokenLogprob]) -> dict[str, Any] | None:
        if self._request.top_logprobs_wanted() is None:
            return None
        return answers.chat_logprobs(parts) if self._chat else answers.completion_logprobs(parts)


class Guard:
    """Checks the API key and counts answers. Plain ASGI: Starlette's own base class would hide from the handlers
    that a client has gone."""

    def __init__(self, app: ASGIApp, key: str, metrics: Metrics) -> None:
        self._app, self._key, self._metrics = app, key, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = path if path in _PATHS else "other"
                self._metrics.requests.labels(known, str(message["status"])).inc()
            await send(message)

        given = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
        if self._key and path.startswith("/v1/") and not hmac.compare_digest(given.encode(), self._key.encode()):
            body = {"error": {"message": "the API key is missing or wrong", "type": "authentication_error"}}
            await JSONResponse(body, status_code=401)(scope, receive, counted)
        else:
            await self._app(scope, receive, counted)


def create_app(config: GatewayConfig) -> FastAPI:
    """The application; its workers are polled from startup to shutdown."""
    gateway = Gateway(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.router.start()
        yield
        await gateway.router.close()

    app = FastAPI(title="KVSidecar", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(Guard, key=config.api_key.get_secret_value(), metrics=gateway.metrics)

    @app.exception_handler(KVSidecarError)
    async def failed(_: Request, error: KVSidecarError) -> JSONResponse:
        return error_response(error)

    app.add_api_route("/v1/models", gateway.models, methods=["GET"])
    app.add_api_route("/v1/chat/completions", gateway.chat, methods=["POST"])
    app.add_api_route("/v1/completions", gateway.complete, methods=["POST"])
    app.add_api_route("/health", gateway.health, methods=["GET"])
    app.add_api_route("/metrics", gateway.show_metrics, methods=["GET"])
    return app


_PATHS = frozenset({"/v1/models", "/v1/chat/completions", "/v1/completions", "/health", "/metrics"})
