"""The HTTP application: OpenAI's paths, those of vLLM that go with them, /health and /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import unquote, unquote_to_bytes

import grpc
import structlog
from fastapi import Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from kvsidecar import __version__
from kvsidecar.errors import (
    InvalidRequest,
    KVSidecarError,
    Unavailable,
    UnknownModel,
    UnsupportedOption,
)
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import REST_OF_CONTEXT
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from inference_svc.gateway import openai_format
from inference_svc.gateway.answer_writer import Writer
from inference_svc.gateway.api_keys import Keys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.client_disconnect import while_there
from inference_svc.gateway.fleet_api import WarmBody, busy, held, serving, warm
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.gateway_metrics import Metrics
from inference_svc.gateway.http_tracing import FIRST_TOKEN, GENERATE_STREAM, current
from inference_svc.gateway.lora_routes import Adapters
from inference_svc.gateway.merged_stream import Piece, about, first_of
from inference_svc.gateway.node_view import NodeView
from inference_svc.gateway.openapi import document
from inference_svc.gateway.request_log import line
from inference_svc.gateway.request_schema import ChatRequest, Common, CompletionRequest
from inference_svc.gateway.responses_api.conversation_store import Memory
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_schema import ResponsesRequest
from inference_svc.gateway.shared_prompt_logprobs import ask_once, handed_on
from inference_svc.gateway.tokenize_routes import detokenize, to_detokenize, to_tokenize, tokenize
from inference_svc.gateway.unsupported_options import parse
from inference_svc.gateway.worker_router import Router, Worker, retryable
from inference_svc.gateway.worker_wait import WorkerWait, preferred_wait_seconds

log = structlog.get_logger("gateway")

Salted = TypeVar("Salted", bound=Common | ResponsesRequest | WarmBody)


@dataclass(frozen=True)
class _Asked:
    """A request for answers, and what workers are asked for it."""

    answer_id: str
    parsed: ChatRequest | CompletionRequest
    requests: list[pb.GenerateRequest]


class Gateway:
    """The handlers. One instance per process."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.keys = Keys(config)
        self.router = Router(config.targets)
        self.metrics = Metrics(self.router, config.supervisor_dir)
        self.bodies = BodyReader(config, self.keys)
        self.adapters = Adapters(self.router, self.keys, self.bodies)
        self._memory = Memory()
        self._wait = WorkerWait(self.router, config)
        self.node = NodeView(self.router, config.cache_socket)

    # ---- endpoints ------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        served = {name: w.model for w in self.router.alive for name in w.names}
        return JSONResponse(
            {
                "object": "list",
                "data": [openai_format.model(m, name, self.router.started) for name, m in served.items()],
            }
        )

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:
            raise UnknownModel("name a model", param="model")
        return JSONResponse(openai_format.model(self._worker(name).model, name, self.router.started))

    async def tokenize(self, request: Request) -> Response:
        model, asked = await self.bodies.read(request, to_tokenize)
        return JSONResponse(await tokenize(self._worker(model), asked))

    async def detokenize(self, request: Request) -> Response:
        model, asked = await self.bodies.read(request, to_detokenize)
        return JSONResponse(await detokenize(self._worker(model), asked))

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
        await self.node.refresh()
        return PlainTextResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def show_node(self, request: Request) -> Response:
        asked = request.headers.get("x-cache-salt", "")
        salt = unquote_to_bytes(asked)
        if self.keys.has_tenants:
            salt = self.keys.salt(request.scope, unquote(asked)).encode()
        shown = await self.node.show(salt, self.keys.of_operator(request.scope))
        return JSONResponse(shown, headers={"Cache-Control": "no-store"})

    async def serving(self, request: Request) -> Response:
        return JSONResponse(serving(self.router, self._wait.is_starting()) | self._load(request))

    def _load(self, request: Request) -> dict[str, int]:
        """How busy the node is, for whoever may know: that tells one tenant of the others."""
        return {"busy": busy(self.router)} if self.keys.of_fleet(request.scope) else {}

    async def held_of_chat(self, request: Request) -> Response:
        return await self._held(request, ChatRequest)

    async def held_of_completion(self, request: Request) -> Response:
        return await self._held(request, CompletionRequest)

    async def held_of_response(self, request: Request) -> Response:
        return await self._held(request, ResponsesRequest)

    async def held_of_warming(self, request: Request) -> Response:
        return await self._held(request, WarmBody)

    async def _held(self, request: Request, kind: type[Salted]) -> Response:
        def prompt_of(raw: bytes, body: Any) -> tuple[str, pb.Prompt, bytes]:
            parsed: Any = self._salted(kind, request, raw, body)
            if isinstance(parsed, ResponsesRequest):
                parsed = parsed.chat(self._before(request, parsed))
            prompt = parsed.to_grpc().prompt if isinstance(parsed, WarmBody) else parsed.prompts()[0]
            return parsed.model, prompt, parsed.cache_salt.encode()

        apart = kind is ResponsesRequest and self._memory.is_large(self.keys.tenant(request.scope))
        model, prompt, salt = await self.bodies.read(request, prompt_of, apart)
        found = await held(self._worker(model), model, self.node.daemon, prompt, salt)
        return JSONResponse(found | self._load(request))

    async def warm(self, request: Request) -> Response:
        def asked_of(raw: bytes, body: Any) -> tuple[pb.WarmRequest, float]:
            parsed = self._salted(WarmBody, request, raw, body)
            self._check_model(parsed.model)
            return parsed.to_grpc(), parsed.within_seconds

        asked, seconds = await self.bodies.read(request, asked_of)
        able = [w for w in self.router.alive if w.serves(asked.model)]
        if not able:
            raise self._away(asked.model)
        return JSONResponse(await while_there(request, warm(min(able, key=lambda w: w.in_flight), asked, seconds)))

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, await self.bodies.read(request, partial(self._asked, ChatRequest, request)))

    async def complete(self, request: Request) -> Response:
        asked = await self.bodies.read(request, partial(self._asked, CompletionRequest, request))
        return await self._answer(request, asked)

    async def respond(self, request: Request) -> Response:
        tenant = self.keys.tenant(request.scope)
        keep, apart = partial(self._memory.keep, tenant), self._memory.is_large(tenant)

        def asked_of(raw: bytes, body: Any) -> tuple[ResponsesRequest, ResponseWriter, pb.GenerateRequest]:
            parsed = self._salted(ResponsesRequest, request, raw, body)
            self._check_model(parsed.model)
            before = self._before(request, parsed)
            chat, model = parsed.chat(before), self._named(parsed.model)
            writer = ResponseWriter(parsed, model, keep, [*before, *parsed.messages()])
            asked = chat.to_grpc(chat.prompts()[0], 0, f"resp-{token_hex(12)}")
            self._fill_in([asked], model)
            return parsed, writer, asked

        parsed, writer, asked = await self.bodies.read(request, asked_of, apart)
        # Not the response's own id: whoever has that may go on from it.
        line().note(id=asked.request_id, model=asked.model)
        pieces = about("text.format", self._merge(request, [asked], not parsed.stream))
        if parsed.stream:
            return _events(writer.stream(await while_there(request, first_of(pieces)), pieces))
        return Response(await while_there(request, writer.whole(pieces)), media_type="application/json")

    async def response(self, request: Request) -> Response:
        found = self._memory.response(self.keys.tenant(request.scope), request.path_params["name"])
        return Response(found, media_type="application/json")

    async def forget(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._memory.drop(self.keys.tenant(request.scope), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    # ---- answering ------------------------------------------------------------------------------------------

    def _salted(self, kind: type[Salted], request: Request, raw: bytes, body: Any) -> Salted:
        """A body with the salt that its sender may use."""
        parsed = parse(kind, raw, body)
        parsed.cache_salt = self.keys.salt(request.scope, parsed.cache_salt)
        return parsed

    def _before(self, request: Request, parsed: ResponsesRequest) -> list[dict[str, Any]]:
        """The conversation that a request goes on from. Raises InvalidRequest."""
        return self._memory.messages(self.keys.tenant(request.scope), parsed.previous_response_id)

    def _asked(self, kind: type[Common], request: Request, raw: bytes, body: Any) -> _Asked:
        """What workers are asked for a body; in a thread where that is large. Raises KVSidecarError."""
        parsed: Any = self._salted(kind, request, raw, body)
        self._check_model(parsed.model)
        model = self._named(parsed.model)
        answer_id = ("chatcmpl-" if kind is ChatRequest else "cmpl-") + token_hex(12)
        prompts = parsed.prompts()
        if parsed.explain and len(prompts) * parsed.choices > 1:
            raise InvalidRequest("explain is for one answer; ask for one prompt with n = 1", param="explain")
        requests = [
            parsed.to_grpc(prompt, choice, f"{answer_id}-{i}-{choice}")
            for i, prompt in enumerate(prompts)
            for choice in range(parsed.choices)
        ]
        self._fill_in(requests, model)
        return _Asked(answer_id, parsed, requests)

    async def _answer(self, request: Request, asked: _Asked) -> Response:
        parsed, requests = asked.parsed, asked.requests
        model = requests[0].model
        line().note(id=asked.answer_id, model=model)
        writer = Writer(asked.answer_id, model, isinstance(parsed, ChatRequest), parsed)
        shared = ask_once(requests, parsed.choices)
        pieces = about(parsed.grammar[0], self._merge(request, requests, not parsed.stream))
        if shared:
            pieces = handed_on(pieces, parsed.choices)
        if parsed.stream:
            # The first piece is awaited here, so that a refused request gets its status code.
            return _events(writer.stream(await while_there(request, first_of(pieces)), pieces))
        found = await while_there(request, writer.whole(pieces, len(requests)))
        if requests[0].HasField("prompt_logprobs"):  # megabytes, perhaps
            return await asyncio.to_thread(JSONResponse, found)
        return JSONResponse(found)

    def _fill_in(self, requests: list[pb.GenerateRequest], model: str) -> None:
        """Sets what is this gateway's to say: the model, and how long answers are where their request does not."""
        for one in requests:
            one.model = model
            if one.max_tokens == REST_OF_CONTEXT and self._config.default_max_tokens:
                one.max_tokens = max(self._config.default_max_tokens, one.min_tokens)

    def _named(self, model: str) -> str:
        """What answers say as their model: the one asked for, or the one that is served."""
        return model or next((w.model.model_id for w in self.router.workers if w.alive), "")

    def _worker(self, name: str) -> Worker:
        """One that serves the model of this name, or any. Raises UnknownModel, Unavailable."""
        self._check_model(name)
        found = next((w for w in self.router.alive if w.serves(name)), None)
        if found is None:
            raise self._away(name)
        return found

    @staticmethod
    def _away(model: str) -> Unavailable:
        return Unavailable(f"no worker that serves {model[:80]!r} is up; try again in a moment")

    def _check_model(self, name: str) -> None:
        """Raises UnknownModel. A worker that is away still has its models: it comes back."""
        served = {name for w in self.router.workers if w.seen for name in w.names}
        if name and served and name not in served:
            raise UnknownModel.among(name, sorted(served))

    async def _merge(self, asked: Request, requests: list[pb.GenerateRequest], whole: bool) -> AsyncIterator[Piece]:
        """The pieces of all choices as they come, or of each choice when it is whole. Ending early cancels all of
        them."""
        span = current()
        span.phase("prepare", span.began, time.perf_counter())
        wait_seconds = preferred_wait_seconds(asked.headers)
        if len(requests) == 1:
            async for part in self._run(requests[0], whole, wait_seconds):
                yield Piece(0, part)
            return
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

        async def pump(choice: int, request: pb.GenerateRequest) -> None:
            try:
                async for part in self._run(request, whole, wait_seconds):
                    queue.put_nowait(Piece(choice, part))
                queue.put_nowait(None)
            except Exception as error:  # whatever it is, the others' answers do not wait for this one
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

    async def _run(
        self, request: pb.GenerateRequest, whole: bool, wait_seconds: float | None
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """One choice, as it comes or at once. While nothing of it was handed on, a worker that goes away is replaced by
        another, or by its successor; a request that ends workers ends as many as there are, or two."""
        tried: list[str] = []
        answer, most = self.metrics.answer(), max(2, len(self.router.workers))
        while True:
            excluded = set(tried) if len(tried) < len(self.router.workers) else set()
            worker = await self._wait.pick(request, excluded, wait_seconds)
            tried.append(worker.target)
            held: list[pb.GenerateStreamResponse] = []
            try:
                async for part in self._call(worker, request):
                    if not answer.started:
                        current().event(FIRST_TOKEN)
                    answer.add(worker.model.model_id, part)
                    if whole:
                        held.append(part)
                    else:
                        yield part
                for part in held:
                    yield part
                return
            except KVSidecarError as error:
                if not retryable(error):
                    raise
                worker.down(str(error))
                if answer.started and not whole:
                    raise Unavailable("the worker broke off its answer; send the request again") from error
                if len(tried) == most:
                    raise Unavailable(f"{most} workers went away while they had this request; try again") from error
                self.metrics.retries.inc()

    async def _call(self, worker: Worker, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateStreamResponse]:
        worker.in_flight += 1
        with current().call(GENERATE_STREAM) as span:
            call = worker.client.stub.GenerateStream(
                pb.GenerateStreamRequest(request=request),
                timeout=self._config.request_seconds,
                metadata=span.metadata(),
            )
            try:
                async for part in call:
                    yield part
            except grpc.RpcError as error:
                raise worker.error_of(error) from error
            finally:
                call.cancel()
                worker.in_flight -= 1


def _events(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
