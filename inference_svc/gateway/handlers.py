"""Request handlers of a node's gateway, one method per endpoint.

Endpoints are OpenAI's, vLLM's companions to them, health and metrics. ``routes`` maps paths to these methods.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Hashable
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
    UnknownModel,
    UnsupportedOption,
)
from kvsidecar.inference.v1 import inference_pb2 as pb
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from inference_svc.gateway import openai_format
from inference_svc.gateway.answer_writer import AnswerWriter
from inference_svc.gateway.anthropic_api.error_envelope import request_id_of
from inference_svc.gateway.anthropic_api.message_writer import MessageWriter
from inference_svc.gateway.anthropic_api.messages_schema import CountTokensRequest, MessagesRequest
from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.cache_fields import CacheFields, ReleaseBody, release_session
from inference_svc.gateway.client_disconnect import cancel_on_disconnect
from inference_svc.gateway.fleet_api import WarmBody, cached_prefix, num_requests, serving_status, warm_prompt
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.gateway_metrics import GatewayMetrics
from inference_svc.gateway.lora_routes import LoraRoutes
from inference_svc.gateway.model_aliases import ModelAliases, parse_aliases
from inference_svc.gateway.node_view import NodeView
from inference_svc.gateway.openapi import document
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.request_runner import (
    ChoiceChunk,
    RequestRunner,
    first_chunk,
    request_logprobs_once,
    share_prompt_logprobs,
    with_grammar_option,
)
from inference_svc.gateway.request_schema import ChatRequest, CompletionRequest, GenerationOptions
from inference_svc.gateway.responses_api.conversation_store import ConversationStore, StoredResponse
from inference_svc.gateway.responses_api.input_items import ITEM, listed, to_messages
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_routes import ResponsesRoutes
from inference_svc.gateway.responses_api.responses_schema import ResponsesRequest
from inference_svc.gateway.served_models import ServedModels, no_worker
from inference_svc.gateway.tokenize_routes import detokenize, to_detokenize, to_tokenize, tokenize, tokenizer_info
from inference_svc.gateway.unsupported_options import parse
from inference_svc.gateway.worker_retry import WorkerRetry
from inference_svc.gateway.worker_router import WorkerRouter
from inference_svc.gateway.worker_wait import WorkerWait, preferred_wait_seconds

log = structlog.get_logger("gateway")

Salted = TypeVar("Salted", bound=CacheFields | CountTokensRequest | ReleaseBody)


@dataclass(frozen=True)
class _AnswerJob:
    """A parsed request, and the worker requests for its answers."""

    answer_id: str
    model: str
    parsed: ChatRequest | CompletionRequest
    requests: list[pb.GenerateRequest]


class GatewayHandlers:
    """The handlers and the objects that they share. One instance per process."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.keys = ApiKeys(config)
        self.router = WorkerRouter(config.targets)
        self._models = ServedModels(self.router, ModelAliases(parse_aliases(config.alias), config.claude_names))
        self.metrics = GatewayMetrics(self.router, config.supervisor_dir)
        self.bodies = BodyReader(config, self.keys)
        self.adapters = LoraRoutes(self.router, self.keys, self.bodies)
        self._conversations = ConversationStore()
        self.kept = ResponsesRoutes(self._conversations, self.keys, self.bodies)
        self._wait = WorkerWait(self.router, config)
        self._requests = RequestRunner(config, WorkerRetry(config, self.router, self.metrics, self._wait))
        self.node = NodeView(self.router, config.cache_socket)

    # ---- endpoints ------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models.entries(self.router.alive)})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:
            raise UnknownModel("name a model", param="model")
        return JSONResponse(openai_format.model(self._models.worker(name).model, name, self.router.started))

    async def tokenize(self, request: Request) -> Response:
        model, asked = await self.bodies.read(request, to_tokenize)
        return JSONResponse(await tokenize(self._models.worker(model), asked))

    async def detokenize(self, request: Request) -> Response:
        model, asked = await self.bodies.read(request, to_detokenize)
        return JSONResponse(await detokenize(self._models.worker(model), asked))

    async def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(await tokenizer_info(self._models.worker("")))

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
        shown = serving_status(
            self._models.entries(w for w in self.router.workers if w.alive), self.router, self._wait.is_starting()
        )
        return JSONResponse(shown | self._load(request))

    def _load(self, request: Request) -> dict[str, int]:
        """Return the node's load to callers that may see it.

        It reveals other tenants' activity.
        """
        return {"busy": num_requests(self.router)} if self.keys.may_see_load(request.scope) else {}

    async def cached_prefix_of_chat(self, request: Request) -> Response:
        return await self._cached_prefix(request, ChatRequest)

    async def cached_prefix_of_completion(self, request: Request) -> Response:
        return await self._cached_prefix(request, CompletionRequest)

    async def cached_prefix_of_response(self, request: Request) -> Response:
        return await self._cached_prefix(request, ResponsesRequest)

    async def cached_prefix_of_message(self, request: Request) -> Response:
        return await self._cached_prefix(request, MessagesRequest)

    async def cached_prefix_of_warm_request(self, request: Request) -> Response:
        return await self._cached_prefix(request, WarmBody)

    async def _cached_prefix(self, request: Request, kind: type[Salted]) -> Response:
        def prompt_of(raw: bytes, body: Any) -> tuple[str, pb.Prompt, bytes]:
            parsed: Any = self._salted(kind, request, raw, body)
            if isinstance(parsed, ResponsesRequest):
                parsed, _, _ = self._chat_of_response(request, parsed)
            elif isinstance(parsed, MessagesRequest):
                parsed = parsed.chat()
            prompt = parsed.to_grpc().prompt if isinstance(parsed, WarmBody) else parsed.prompts()[0]
            return self._models.resolve(parsed.model), prompt, parsed.cache_salt.encode()

        apart = kind is ResponsesRequest and self._conversations.is_large(self.keys.tenant(request.scope))
        model, prompt, salt = await self.bodies.read(request, prompt_of, apart)
        found = await cached_prefix(self._models.worker(model), model, self.node.daemon, prompt, salt)
        return JSONResponse(found | self._load(request))

    async def warm_prompt(self, request: Request) -> Response:
        def parse_request(raw: bytes, body: Any) -> tuple[pb.WarmRequest, float]:
            parsed = self._salted(WarmBody, request, raw, body)
            self._models.check(parsed.model)
            parsed.model = self._models.resolve(parsed.model)
            return parsed.to_grpc(), parsed.within_seconds

        asked, seconds = await self.bodies.read(request, parse_request)
        able = [w for w in self.router.alive if w.serves(asked.model)]
        if not able:
            raise no_worker(asked.model)
        return JSONResponse(
            await cancel_on_disconnect(request, warm_prompt(min(able, key=lambda w: w.in_flight), asked, seconds))
        )

    async def release_session(self, request: Request) -> Response:
        def parse_request(raw: bytes, body: Any) -> pb.ReleaseSessionRequest:
            parsed = self._salted(ReleaseBody, request, raw, body)
            self._models.check(parsed.model)
            parsed.model = self._models.resolve(parsed.model)
            return parsed.to_grpc()

        asked = await self.bodies.read(request, parse_request)
        return JSONResponse(await release_session(self._models.worker(asked.model), asked))

    async def chat(self, request: Request) -> Response:
        return await self._answer(
            request, await self.bodies.read(request, partial(self._parse_job, ChatRequest, request))
        )

    async def complete(self, request: Request) -> Response:
        asked = await self.bodies.read(request, partial(self._parse_job, CompletionRequest, request))
        return await self._answer(request, asked)

    async def respond(self, request: Request) -> Response:
        tenant = self.keys.tenant(request.scope)
        apart = self._conversations.is_large(tenant)

        def parse_request(raw: bytes, body: Any) -> tuple[ResponsesRequest, ResponseWriter, pb.GenerateRequest]:
            parsed = self._salted(ResponsesRequest, request, raw, body)
            self._models.check(parsed.model)
            chat, messages, given = self._chat_of_response(request, parsed)
            model = self._models.answer_model(parsed.model)
            writer = ResponseWriter(parsed, model, partial(self._keep_response, tenant, parsed), messages, given)
            asked = chat.to_grpc(chat.prompts()[0], 0, f"resp-{token_hex(12)}")
            self._requests.set_defaults([asked], self._models.resolve(model))
            return parsed, writer, asked

        parsed, writer, asked = await self.bodies.read(request, parse_request, apart)
        # Not the response's own id: anyone who reads it in the log could continue the conversation.
        log_line().add(id=asked.request_id, model=writer.model, skipped_tools=",".join(parsed.skipped_tools))
        pieces = with_grammar_option("text.format", self._run(request, [asked], not parsed.stream))
        if parsed.stream:
            return _events(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        return Response(await cancel_on_disconnect(request, writer.whole(pieces)), media_type="application/json")

    async def create_message(self, request: Request) -> Response:
        request_id = request_id_of(request.scope)

        def parse_request(raw: bytes, body: Any) -> tuple[MessagesRequest, pb.GenerateRequest]:
            parsed = self._salted(MessagesRequest, request, raw, body)
            self._models.check(parsed.model)
            chat = parsed.chat()
            asked = chat.to_grpc(chat.prompts()[0], 0, request_id)
            asked.continuous_usage = parsed.stream
            self._requests.set_defaults([asked], self._models.resolve(parsed.model))
            return parsed, asked

        parsed, asked = await self.bodies.read(request, parse_request)
        log_line().add(model=parsed.model, skipped_tools=parsed.skipped_tools())
        writer = MessageWriter(parsed, request_id)
        pieces = with_grammar_option("output_config.format", self._run(request, [asked], not parsed.stream))
        if parsed.stream:
            return _events(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        return JSONResponse(await cancel_on_disconnect(request, writer.whole(pieces)))

    async def count_tokens(self, request: Request) -> Response:
        def parse_request(raw: bytes, body: Any) -> tuple[str, pb.TokenizeRequest]:
            parsed = self._salted(CountTokensRequest, request, raw, body)
            return parsed.model, pb.TokenizeRequest(prompt=parsed.prompt(), tenant_salt=parsed.cache_salt.encode())

        model, asked = await self.bodies.read(request, parse_request)
        return JSONResponse({"input_tokens": (await tokenize(self._models.worker(model), asked))["count"]})

    async def count_input(self, request: Request) -> Response:
        """Answer ``/v1/responses/input_tokens``: tokens of a request's prompt."""

        def parse_request(raw: bytes, body: Any) -> tuple[str, pb.TokenizeRequest]:
            parsed = self._salted(ResponsesRequest, request, raw, body)
            chat, _, _ = self._chat_of_response(request, parsed)
            return parsed.model, pb.TokenizeRequest(prompt=chat.prompts()[0])

        apart = self._conversations.is_large(self.keys.tenant(request.scope))
        model, asked = await self.bodies.read(request, parse_request, apart)
        found = await tokenize(self._models.worker(model), asked)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": found["count"]})

    # ---- answering ------------------------------------------------------------------------------------------

    def _salted(self, kind: type[Salted], request: Request, raw: bytes, body: Any) -> Salted:
        """Parse a body, and set the salt that its sender may use."""
        parsed = parse(kind, raw, body)
        parsed.cache_salt = self.keys.salt(request.scope, parsed.cache_salt)
        return parsed

    def _chat_of_response(
        self, request: Request, parsed: ResponsesRequest
    ) -> tuple[ChatRequest, list[dict[str, Any]], list[dict[str, Any]]]:
        """Return a response's chat request, its messages, and the items of its input. Raises InvalidRequest."""
        tenant, conversation = self.keys.tenant(request.scope), parsed.conversation_id
        param = "previous_response_id" if conversation is None else "conversation"
        before = self._conversations.messages(tenant, conversation or parsed.previous_response_id, param)
        items = parsed.items(lambda name: ITEM.validate_python(self._conversations.item(tenant, name)))
        said = to_messages(items)
        return parsed.chat(before, said), [*before, *said], listed(items)

    def _keep_response(self, tenant: Hashable, parsed: ResponsesRequest, stored: StoredResponse) -> None:
        if parsed.store is not False:
            self._conversations.keep(tenant, stored)
        if parsed.conversation_id is not None:
            items = [*json.loads(stored.items), *json.loads(stored.response)["output"]]
            self.kept.append(tenant, parsed.conversation_id, items)

    def _parse_job(self, kind: type[GenerationOptions], request: Request, raw: bytes, body: Any) -> _AnswerJob:
        """Convert a body to worker requests. Raises KVSidecarError.

        Runs in a thread for a large body.
        """
        parsed: Any = self._salted(kind, request, raw, body)
        self._models.check(parsed.model)
        model = self._models.answer_model(parsed.model)
        answer_id = ("chatcmpl-" if kind is ChatRequest else "cmpl-") + token_hex(12)
        prompts = parsed.prompts()
        if parsed.explain and len(prompts) * parsed.num_choices > 1:
            raise InvalidRequest("explain is for one answer; ask for one prompt with n = 1", param="explain")
        requests = [
            parsed.to_grpc(prompt, choice, f"{answer_id}-{i}-{choice}")
            for i, prompt in enumerate(prompts)
            for choice in range(parsed.num_choices)
        ]
        self._requests.set_defaults(requests, self._models.resolve(model))
        return _AnswerJob(answer_id, model, parsed, requests)

    async def _answer(self, request: Request, asked: _AnswerJob) -> Response:
        parsed, requests = asked.parsed, asked.requests
        log_line().add(id=asked.answer_id, model=asked.model)
        writer = AnswerWriter(asked.answer_id, asked.model, self._models.fingerprint(asked.model), parsed)
        shared = request_logprobs_once(requests, parsed.num_choices)
        pieces = with_grammar_option(parsed.grammar[0], self._run(request, requests, not parsed.stream))
        if shared:
            pieces = share_prompt_logprobs(pieces, parsed.num_choices)
        if parsed.stream:
            # Await the first chunk here, so that a refused request gets its status code.
            return _events(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        found = await cancel_on_disconnect(request, writer.whole(pieces, len(requests)))
        if requests[0].HasField("prompt_logprobs"):  # it may have megabytes
            return await asyncio.to_thread(JSONResponse, found)
        return JSONResponse(found)

    def _run(self, request: Request, requests: list[pb.GenerateRequest], whole: bool) -> AsyncIterator[ChoiceChunk]:
        return self._requests.run(requests, whole, preferred_wait_seconds(request.headers))


def _events(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
