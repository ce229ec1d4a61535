"""Request handlers of a node's gateway, one method per endpoint.

Endpoints are OpenAI's, vLLM's companions to them, health and metrics. ``routes`` maps paths to these methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import unquote, unquote_to_bytes

import structlog
from fastapi import Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from kvsidecar import __version__
from kvsidecar.errors import (
    InvalidRequest,
    Unavailable,
    UnknownModel,
    UnsupportedOption,
)
from kvsidecar.inference.v1 import inference_pb2 as pb
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from inference_svc.gateway import openai_format
from inference_svc.gateway.answer_writer import AnswerWriter
from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.cache_fields import ReleaseBody, release_session
from inference_svc.gateway.client_disconnect import cancel_on_disconnect
from inference_svc.gateway.fleet_api import WarmBody, cached_prefix, num_requests, serving_status, warm_prompt
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.gateway_metrics import GatewayMetrics
from inference_svc.gateway.lora_routes import LoraRoutes
from inference_svc.gateway.node_view import NodeView
from inference_svc.gateway.openapi import document
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.request_runner import (
    ChoiceChunk,
    Generator,
    first_chunk,
    request_logprobs_once,
    share_prompt_logprobs,
    with_grammar_option,
)
from inference_svc.gateway.request_schema import ChatRequest, CompletionRequest, GenerationOptions
from inference_svc.gateway.responses_api.conversation_store import ConversationStore
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_schema import ResponsesRequest
from inference_svc.gateway.tokenize_routes import detokenize, to_detokenize, to_tokenize, tokenize
from inference_svc.gateway.unsupported_options import parse
from inference_svc.gateway.worker_router import Worker, WorkerRouter
from inference_svc.gateway.worker_wait import WorkerWait, preferred_wait_seconds

log = structlog.get_logger("gateway")

Salted = TypeVar("Salted", bound=GenerationOptions | ResponsesRequest | WarmBody | ReleaseBody)


@dataclass(frozen=True)
class _AnswerJob:
    """A parsed request, and the worker requests for its answers."""

    answer_id: str
    parsed: ChatRequest | CompletionRequest
    requests: list[pb.GenerateRequest]


class GatewayHandlers:
    """The handlers and the objects that they share. One instance per process."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.keys = ApiKeys(config)
        self.router = WorkerRouter(config.targets)
        self.metrics = GatewayMetrics(self.router, config.supervisor_dir)
        self.bodies = BodyReader(config, self.keys)
        self.adapters = LoraRoutes(self.router, self.keys, self.bodies)
        self._conversations = ConversationStore()
        self._wait = WorkerWait(self.router, config)
        self._generator = Generator(config, self.router, self.metrics, self._wait)
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
        shown = await self.node.show(salt, self.keys.is_operator(request.scope))
        return JSONResponse(shown, headers={"Cache-Control": "no-store"})

    async def serving_status(self, request: Request) -> Response:
        return JSONResponse(serving_status(self.router, self._wait.is_starting()) | self._load(request))

    def _load(self, request: Request) -> dict[str, int]:
        """Return the node's load to callers who may see it: it tells a tenant about the others."""
        return {"busy": num_requests(self.router)} if self.keys.may_see_load(request.scope) else {}

    async def cached_prefix_of_chat(self, request: Request) -> Response:
        return await self._cached_prefix(request, ChatRequest)

    async def cached_prefix_of_completion(self, request: Request) -> Response:
        return await self._cached_prefix(request, CompletionRequest)

    async def cached_prefix_of_response(self, request: Request) -> Response:
        return await self._cached_prefix(request, ResponsesRequest)

    async def cached_prefix_of_warm_request(self, request: Request) -> Response:
        return await self._cached_prefix(request, WarmBody)

    async def _cached_prefix(self, request: Request, kind: type[Salted]) -> Response:
        def prompt_of(raw: bytes, body: Any) -> tuple[str, pb.Prompt, bytes]:
            parsed: Any = self._salted(kind, request, raw, body)
            if isinstance(parsed, ResponsesRequest):
                parsed = parsed.chat(self._previous_messages(request, parsed))
            prompt = parsed.to_grpc().prompt if isinstance(parsed, WarmBody) else parsed.prompts()[0]
            return parsed.model, prompt, parsed.cache_salt.encode()

        apart = kind is ResponsesRequest and self._conversations.is_large(self.keys.tenant(request.scope))
        model, prompt, salt = await self.bodies.read(request, prompt_of, apart)
        found = await cached_prefix(self._worker(model), model, self.node.daemon, prompt, salt)
        return JSONResponse(found | self._load(request))

    async def warm_prompt(self, request: Request) -> Response:
        def parse_request(raw: bytes, body: Any) -> tuple[pb.WarmRequest, float]:
            parsed = self._salted(WarmBody, request, raw, body)
            self._check_model(parsed.model)
            return parsed.to_grpc(), parsed.within_seconds

        asked, seconds = await self.bodies.read(request, parse_request)
        able = [w for w in self.router.alive if w.serves(asked.model)]
        if not able:
            raise self._unavailable(asked.model)
        return JSONResponse(
            await cancel_on_disconnect(request, warm_prompt(min(able, key=lambda w: w.in_flight), asked, seconds))
        )

    async def release_session(self, request: Request) -> Response:
        def parse_request(raw: bytes, body: Any) -> pb.ReleaseSessionRequest:
            parsed = self._salted(ReleaseBody, request, raw, body)
            self._check_model(parsed.model)
            return parsed.to_grpc()

        asked = await self.bodies.read(request, parse_request)
        return JSONResponse(await release_session(self._worker(asked.model), asked))

    async def chat(self, request: Request) -> Response:
        return await self._answer(
            request, await self.bodies.read(request, partial(self._parse_job, ChatRequest, request))
        )

    async def complete(self, request: Request) -> Response:
        asked = await self.bodies.read(request, partial(self._parse_job, CompletionRequest, request))
        return await self._answer(request, asked)

    async def respond(self, request: Request) -> Response:
        tenant = self.keys.tenant(request.scope)
        keep, apart = partial(self._conversations.keep, tenant), self._conversations.is_large(tenant)

        def parse_request(raw: bytes, body: Any) -> tuple[ResponsesRequest, ResponseWriter, pb.GenerateRequest]:
            parsed = self._salted(ResponsesRequest, request, raw, body)
            self._check_model(parsed.model)
            before = self._previous_messages(request, parsed)
            chat, model = parsed.chat(before), self._answer_model(parsed.model)
            writer = ResponseWriter(parsed, model, keep, [*before, *parsed.messages()])
            asked = chat.to_grpc(chat.prompts()[0], 0, f"resp-{token_hex(12)}")
            self._generator.set_defaults([asked], model)
            return parsed, writer, asked

        parsed, writer, asked = await self.bodies.read(request, parse_request, apart)
        # Not the response's own id: anyone who reads it in the log could continue the conversation.
        log_line().add(id=asked.request_id, model=asked.model)
        pieces = with_grammar_option("text.format", self._run(request, [asked], not parsed.stream))
        if parsed.stream:
            return _events(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        return Response(await cancel_on_disconnect(request, writer.whole(pieces)), media_type="application/json")

    async def response(self, request: Request) -> Response:
        found = self._conversations.response(self.keys.tenant(request.scope), request.path_params["name"])
        return Response(found, media_type="application/json")

    async def forget(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._conversations.drop(self.keys.tenant(request.scope), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    # ---- answering ------------------------------------------------------------------------------------------

    def _salted(self, kind: type[Salted], request: Request, raw: bytes, body: Any) -> Salted:
        """Parse a body, and set the salt that its sender may use."""
        parsed = parse(kind, raw, body)
        parsed.cache_salt = self.keys.salt(request.scope, parsed.cache_salt)
        return parsed

    def _previous_messages(self, request: Request, parsed: ResponsesRequest) -> list[dict[str, Any]]:
        """Return the conversation that a request continues. Raises InvalidRequest."""
        return self._conversations.messages(self.keys.tenant(request.scope), parsed.previous_response_id)

    def _parse_job(self, kind: type[GenerationOptions], request: Request, raw: bytes, body: Any) -> _AnswerJob:
        """Convert a body to worker requests; runs in a thread for a large body. Raises KVSidecarError."""
        parsed: Any = self._salted(kind, request, raw, body)
        self._check_model(parsed.model)
        model = self._answer_model(parsed.model)
        answer_id = ("chatcmpl-" if kind is ChatRequest else "cmpl-") + token_hex(12)
        prompts = parsed.prompts()
        if parsed.explain and len(prompts) * parsed.num_choices > 1:
            raise InvalidRequest("explain is for one answer; ask for one prompt with n = 1", param="explain")
        requests = [
            parsed.to_grpc(prompt, choice, f"{answer_id}-{i}-{choice}")
            for i, prompt in enumerate(prompts)
            for choice in range(parsed.num_choices)
        ]
        self._generator.set_defaults(requests, model)
        return _AnswerJob(answer_id, parsed, requests)

    async def _answer(self, request: Request, asked: _AnswerJob) -> Response:
        parsed, requests = asked.parsed, asked.requests
        model = requests[0].model
        log_line().add(id=asked.answer_id, model=model)
        writer = AnswerWriter(asked.answer_id, model, isinstance(parsed, ChatRequest), parsed)
        shared = request_logprobs_once(requests, parsed.num_choices)
        pieces = with_grammar_option(parsed.grammar[0], self._run(request, requests, not parsed.stream))
        if shared:
            pieces = share_prompt_logprobs(pieces, parsed.num_choices)
        if parsed.stream:
            # Await the first chunk here, so that a refused request gets its status code.
            return _events(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        found = await cancel_on_disconnect(request, writer.whole(pieces, len(requests)))
        if requests[0].HasField("prompt_logprobs"):  # megabytes, perhaps
            return await asyncio.to_thread(JSONResponse, found)
        return JSONResponse(found)

    def _run(self, request: Request, requests: list[pb.GenerateRequest], whole: bool) -> AsyncIterator[ChoiceChunk]:
        return self._generator.run(requests, whole, preferred_wait_seconds(request.headers))

    def _answer_model(self, model: str) -> str:
        """Return the model name for answers: the requested one, or the served one."""
        return model or next((w.model.model_id for w in self.router.workers if w.alive), "")

    def _worker(self, name: str) -> Worker:
        """Return a worker that serves the model, or any for an empty name. Raises UnknownModel, Unavailable."""
        self._check_model(name)
        found = next((w for w in self.router.alive if w.serves(name)), None)
        if found is None:
            raise self._unavailable(name)
        return found

    @staticmethod
    def _unavailable(model: str) -> Unavailable:
        return Unavailable(f"no worker that serves {model[:80]!r} is up; try again in a moment")

    def _check_model(self, name: str) -> None:
        """Raise UnknownModel for an unknown name. Models of a worker that is down still count: it comes back."""
        served = {name for w in self.router.workers if w.was_up for name in w.names}
        if name and served and name not in served:
            raise UnknownModel.among(name, sorted(served))


def _events(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
