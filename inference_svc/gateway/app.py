"""The HTTP application: OpenAI's paths, those of vLLM that go with them, /health and /metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from kvsidecar import __version__
from kvsidecar.errors import InvalidRequest, KVSidecarError, UnknownModel, UnsupportedOption, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from inference_svc.gateway import answers
from inference_svc.gateway.access import Keys
from inference_svc.gateway.checking import parse
from inference_svc.gateway.config import GatewayConfig
from inference_svc.gateway.guard import NODE, Guard, Metrics
from inference_svc.gateway.node import NodeView
from inference_svc.gateway.openapi import document
from inference_svc.gateway.pieces import Piece
from inference_svc.gateway.responses.memory import Memory
from inference_svc.gateway.responses.schema import ResponsesRequest
from inference_svc.gateway.responses.writing import ResponseWriter
from inference_svc.gateway.router import Router, Worker, retryable
from inference_svc.gateway.schema import MAX_ANSWERS, ChatRequest, CompletionRequest
from inference_svc.gateway.static import Page
from inference_svc.gateway.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from inference_svc.gateway.writing import Writer, error_response, unknown_path

log = structlog.get_logger("gateway")


class Gateway:
    """The handlers. One instance per process."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.keys = Keys(config)
        self.router = Router(config.targets)
        self.metrics = Metrics(self.router)
        self._memory = Memory()
        self.node = NodeView(self.router, config.cache_socket)

    # ---- endpoints ------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        served = {w.model.model_id: w.model for w in self.router.alive}
        return JSONResponse({"object": "list", "data": [answers.model(m) for m in served.values()]})

    async def model(self, request: Request) -> Response:
        worker = self._worker(request.path_params["name"])
        return JSONResponse(answers.model(worker.model))

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._body(request))
        return JSONResponse(await tokenize(self._worker(body.model), body))

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._body(request))
        return JSONResponse(await detokenize(self._worker(body.model), body))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def describe(self, request: Request) -> Response:
        return JSONResponse(document())

    async def embed(self, request: Request) -> Response:
        raise UnsupportedOption("this server has no embeddings: it serves models that generate text", param="model")

    async def health(self, request: Request) -> Response:
        up = [w.target for w in self.router.workers if w.alive]
        body = {"status": "ok" if up else "no worker is up", "workers_up": len(up), "workers": len(self.router.workers)}
        return JSONResponse(body, status_code=200 if up else 503)

    async def show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def show_node(self, request: Request) -> Response:
        salt = unquote_to_bytes(request.headers.get("x-cache-salt", ""))
        shown = await self.node.show(salt, self.keys.of_operator(request.scope))
        return JSONResponse(shown, headers={"Cache-Control": "no-store"})

    async def chat(self, request: Request) -> Response:
        parsed = parse(ChatRequest, await self._body(request))
        return await self._answer(request, parsed, chat=True)

    async def complete(self, request: Request) -> Response:
        parsed = parse(CompletionRequest, await self._body(request))
        return await self._answer(request, parsed, chat=False)

    async def respond(self, request: Request) -> Response:
        parsed = parse(ResponsesRequest, await self._body(request))
        self._check_model(parsed.model)
        before = self._memory.messages(parsed.previous_response_id)
        chat = parsed.chat(before)
        writer = ResponseWriter(parsed, self._named(parsed.model), self._memory, [*before, *parsed.messages()])
        asked = chat.to_grpc(chat.prompts()[0], 0, f"resp-{token_hex(12)}")
        pieces = _about("text.format", self._merge([asked]))
        if parsed.stream:
            return _events(writer.stream(await anext(pieces), pieces))
        return await self._unless_gone(request, writer.whole(pieces))

    async def response(self, request: Request) -> Response:
        return JSONResponse(self._memory.response(request.path_params["name"]))

    async def forget(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._memory.drop(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

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
        if parsed.explain and len(prompts) * parsed.choices > 1:
            raise InvalidRequest("explain is for one answer; ask for one prompt with n = 1", param="explain")
        requests = [
            parsed.to_grpc(prompt, choice, f"{answer_id}-{i}-{choice}")
            for i, prompt in enumerate(prompts)
            for choice in range(parsed.choices)
        ]
        writer = Writer(answer_id, self._named(parsed.model), chat, parsed)
        pieces = _about(parsed.grammar[0], self._merge(requests))
        if parsed.stream:
            # The first piece is awaited here, so that a refused request gets its status code.
            return _events(writer.stream(await anext(pieces), pieces))
        return await self._unless_gone(request, writer.whole(pieces, len(requests)))

    @staticmethod
    async def _unless_gone(request: Request, answer: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        """A whole answer, which nobody computes any more when its client has gone."""
        work = asyncio.create_task(answer)
        while not work.done():
            await asyncio.wait({work}, timeout=0.25)
            if not work.done() and await request.is_disconnected():
                work.cancel()
                return Response(status_code=499)
        return JSONResponse(work.result())

    def _named(self, model: str) -> str:
        """What answers say as their model: the one asked for, or the one that is served."""
        return model or next((w.model.model_id for w in self.router.workers if w.alive), "")

    def _worker(self, name: str) -> Worker:
        """One that serves the model of this name, or any. Raises UnknownModel, Unavailable."""
        self._check_model(name)
        return next(w for w in self.router.alive if name in ("", w.model.model_id))

    def _check_model(self, name: str) -> None:
        served = {w.model.model_id for w in self.router.workers if w.alive}
        if name and served and name not in served:
            raise UnknownModel(
                f"the model {name!r} is not served here; served: {', '.join(sorted(served))}", param="model"
            )

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


def _events(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _about(option: str, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """The pieces; errors about the grammar name the option that it came by."""
    try:
        async for piece in pieces:
            yield piece
    except KVSidecarError as error:
        if error.param == "grammar":
            error.param = option
        raise


def create_app(config: GatewayConfig) -> FastAPI:
    """The application; its workers are polled from startup to shutdown."""
    gateway = Gateway(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.router.start()
        await gateway.node.start()
        yield
        await gateway.node.close()
        await gateway.router.close()

    app = FastAPI(title="KVSidecar", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(Guard, keys=gateway.keys, metrics=gateway.metrics)

    @app.exception_handler(KVSidecarError)
    async def failed(_: Request, error: KVSidecarError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def not_here(request: Request, error: HTTPException) -> JSONResponse:
        return unknown_path(request.method, request.url.path, error.status_code, error.headers)

    app.add_api_route("/v1/models", gateway.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", gateway.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", gateway.chat, methods=["POST"])
    app.add_api_route("/v1/completions", gateway.complete, methods=["POST"])
    app.add_api_route("/v1/responses", gateway.respond, methods=["POST"])
    app.add_api_route("/v1/responses/{name}", gateway.response, methods=["GET"])
    app.add_api_route("/v1/responses/{name}", gateway.forget, methods=["DELETE"])
    app.add_api_route("/v1/embeddings", gateway.embed, methods=["POST"])
    app.add_api_route("/tokenize", gateway.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", gateway.detokenize, methods=["POST"])
    app.add_api_route("/openapi.json", gateway.describe, methods=["GET"])
    app.add_api_route("/version", gateway.version, methods=["GET"])
    app.add_api_route("/health", gateway.health, methods=["GET"])
    app.add_api_route("/metrics", gateway.show_metrics, methods=["GET"])
    app.add_api_route(NODE, gateway.show_node, methods=["GET"])
    if config.page:
        page = Page()
        app.add_api_route("/", page.index, methods=["GET", "HEAD"])
        app.add_api_route("/page/{name}", page.file, methods=["GET", "HEAD"])
    return app
