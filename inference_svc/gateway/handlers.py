"""Request handlers of a node's gateway, one method per endpoint.

The endpoints are those of OpenAI's API, vLLM's additional ones, our own, and metrics. ``routes`` maps paths to methods.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote, unquote_to_bytes

import structlog
from fastapi import Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from kvsidecar import __version__
from kvsidecar.errors import (
    UnknownModel,
    UnsupportedOption,
)
from kvsidecar.inference.v1 import inference_pb2 as pb
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from inference_svc.gateway import openai_fields
from inference_svc.gateway.answer_services import AnswerServices
from inference_svc.gateway.anthropic_api.count_tokens import CountTokens
from inference_svc.gateway.anthropic_api.messages_handler import MessagesHandler
from inference_svc.gateway.anthropic_api.messages_request import MessagesRequest
from inference_svc.gateway.anthropic_api.model_list import model_response, models_response
from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.cache_hints import ReleaseBody, release_session
from inference_svc.gateway.client_disconnect import cancel_on_disconnect
from inference_svc.gateway.completion_handlers import CompletionHandlers
from inference_svc.gateway.fleet_api import (
    PromptBody,
    WarmBody,
    cached_prefix,
    num_requests,
    serving_status,
    warm_prompt,
)
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.gateway_metrics import GatewayMetrics
from inference_svc.gateway.lora_routes import LoraRoutes
from inference_svc.gateway.model_aliases import ModelAliases, parse_aliases
from inference_svc.gateway.node_view import NodeView
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest
from inference_svc.gateway.openapi import encoded_document
from inference_svc.gateway.prompt_pins import PinBody, UnpinBody, pin_prompt, unpin_prompt
from inference_svc.gateway.request_history import RequestHistory
from inference_svc.gateway.request_parser import RequestParser, Salted
from inference_svc.gateway.request_runner import (
    RequestRunner,
)
from inference_svc.gateway.responses_api.conversation_store import ConversationStore
from inference_svc.gateway.responses_api.responses_handler import ResponsesHandler
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.responses_api.stored_response_routes import StoredResponseRoutes
from inference_svc.gateway.served_models import ServedModels, no_worker
from inference_svc.gateway.tokenize_routes import (
    detokenize,
    to_detokenize,
    to_tokenize,
    tokenize,
    tokenize_response,
    tokenizer_info,
)
from inference_svc.gateway.worker_retry import WorkerRetry
from inference_svc.gateway.worker_router import Worker, WorkerRouter
from inference_svc.gateway.worker_wait import WorkerWait

CacheBody = TypeVar("CacheBody", bound=PromptBody | ReleaseBody | UnpinBody)
log = structlog.get_logger("gateway")


class GatewayHandlers:
    """Request handlers of a node's gateway, and the objects that they share. One instance per process."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.keys = ApiKeys(config)
        self.router = WorkerRouter(config.targets)
        self._models = ServedModels(self.router, ModelAliases(parse_aliases(config.alias), config.claude_names))
        self.metrics = GatewayMetrics(self.router, config.supervisor_dir)
        self.bodies = BodyReader(config, self.keys)
        self.adapters = LoraRoutes(self.router, self.keys, self.bodies)
        self._conversations = ConversationStore(max_referenced_bytes=config.max_body_bytes)
        self._history = RequestHistory()
        self._parser = RequestParser(self.keys, self._conversations)
        self.kept = StoredResponseRoutes(self._conversations, self.keys, self.bodies)
        self.count_tokens = CountTokens(self.bodies, self._parser, self._models)
        self._wait = WorkerWait(self.router, config)
        runner = RequestRunner(config, WorkerRetry(config, self.router, self.metrics, self._wait))
        services = AnswerServices(
            self.keys, self.bodies, self._parser, self._models, runner, self._conversations, self.kept, self._history
        )
        self.completions = CompletionHandlers(services)
        self.responses, self.messages = ResponsesHandler(services), MessagesHandler(services)
        self.node = NodeView(self.router, config.cache_socket)

    # ---- endpoints ------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return models_response(request, self._models.entries(self.router.alive))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:
            raise UnknownModel("name a model", param="model")
        found = openai_fields.model(self._models.worker(name).model, name, self.router.started)
        return model_response(request, found)

    async def tokenize(self, request: Request) -> Response:
        model, asked = await self.bodies.read(request, to_tokenize)
        return await tokenize_response(self._models.worker(model), asked)

    async def detokenize(self, request: Request) -> Response:
        model, asked = await self.bodies.read(request, to_detokenize)
        return JSONResponse(await detokenize(self._models.worker(model), asked))

    async def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(await tokenizer_info(self._models.worker("")))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def describe(self, request: Request) -> Response:
        return Response(encoded_document(), media_type="application/json")

    async def embed(self, request: Request) -> Response:
        raise UnsupportedOption("this server has no embeddings: it serves models that generate text", param="model")

    async def show_metrics(self, request: Request) -> Response:
        await self.node.refresh()
        return PlainTextResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def show_node(self, request: Request) -> Response:
        shown = await self.node.show(self._header_salt(request), self.keys.is_operator(request.scope))
        return JSONResponse(shown, headers={"Cache-Control": "no-store"})

    async def show_request(self, request: Request) -> Response:
        """Answer ``kvsidecar why`` with the token counts and the miss reason of an earlier answer."""
        tenant, salt = self.keys.tenant(request.scope), self._header_salt(request).decode("utf-8", "replace")
        operator = self.keys.is_operator(request.scope)
        found = self._history.find(request.path_params["name"], tenant, salt, operator=operator)
        return JSONResponse(found, headers={"Cache-Control": "no-store"})

    def _header_salt(self, request: Request) -> bytes:
        asked = request.headers.get("x-cache-salt", "")
        return (
            self.keys.salt(request.scope, unquote(asked)).encode() if self.keys.has_tenants else unquote_to_bytes(asked)
        )

    async def serving_status(self, request: Request) -> Response:
        shown = serving_status(
            self._models.entries(w for w in self.router.workers if w.alive), self.router, self._wait.is_starting()
        )
        return JSONResponse(shown | self._load(request))

    def _load(self, request: Request) -> dict[str, int]:
        """Return the node's load; empty for a caller that may not see other tenants' activity."""
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
            parsed: Any = self._parser.salted(kind, request, raw, body)
            if isinstance(parsed, ResponsesRequest):
                parsed, _, _ = self._parser.chat_of_response(request, parsed)
            elif isinstance(parsed, MessagesRequest):
                parsed = parsed.chat()
            prompt = parsed.to_grpc().prompt if isinstance(parsed, WarmBody) else parsed.prompts()[0]
            return self._models.resolve(parsed.model), prompt, parsed.cache_salt.encode()

        apart = kind is ResponsesRequest and self._conversations.is_large(self.keys.tenant(request.scope))
        model, prompt, salt = await self.bodies.read(request, prompt_of, apart)
        found = await cached_prefix(self._models.worker(model), model, self.node.daemon, prompt, salt)
        return JSONResponse(found | self._load(request))

    async def warm_prompt(self, request: Request) -> Response:
        asked, seconds = await self._read_prompt(WarmBody, request)
        return JSONResponse(
            await cancel_on_disconnect(request, warm_prompt(self._idlest_worker(asked.model), asked, seconds))
        )

    async def _read_prompt(self, kind: type[PromptBody], request: Request) -> tuple[pb.WarmRequest, float]:
        """Return the prefill request of a body, and its deadline in seconds."""

        def parse_request(raw: bytes, body: Any) -> tuple[pb.WarmRequest, float]:
            parsed = self._parse_for_model(kind, request, raw, body)
            return parsed.to_grpc(), parsed.within_seconds

        return await self.bodies.read(request, parse_request)

    def _parse_for_model(self, kind: type[CacheBody], request: Request, raw: bytes, body: Any) -> CacheBody:
        """Parse a body, and resolve the alias of its model. Raises InvalidRequest, UnknownModel."""
        parsed = self._parser.salted(kind, request, raw, body)
        self._models.check(parsed.model)
        parsed.model = self._models.resolve(parsed.model)
        return parsed

    def _idlest_worker(self, model: str) -> Worker:
        """Return the worker with the fewest requests that serves the model. Raises Unavailable, UnknownModel."""
        able = [w for w in self.router.alive if w.serves(model)]
        if not able:
            raise no_worker(model)
        return min(able, key=lambda w: w.in_flight)

    async def pin_prompt(self, request: Request) -> Response:
        """Prefill a prompt, then pin its stored prefix."""
        asked, seconds = await self._read_prompt(PinBody, request)
        worker = self._idlest_worker(asked.model)

        async def pin() -> dict[str, Any]:
            warmed = await warm_prompt(worker, asked, seconds)
            return warmed | await pin_prompt(worker, self.node.daemon, asked, self.keys.pinning_client(request.scope))

        return JSONResponse(await cancel_on_disconnect(request, pin()))

    async def unpin_prompt(self, request: Request) -> Response:
        asked = await self.bodies.read(request, partial(self._parse_for_model, UnpinBody, request))
        caller = self.keys.pinning_client(request.scope)
        return JSONResponse(await unpin_prompt(self._models.worker(asked.model), self.node.daemon, asked, caller))

    async def release_session(self, request: Request) -> Response:
        asked = await self.bodies.read(request, partial(self._parse_for_model, ReleaseBody, request))
        return JSONResponse(await release_session(self._models.worker(asked.model), asked.to_grpc()))

    async def count_input(self, request: Request) -> Response:
        """Answer ``/v1/responses/input_tokens`` with the number of tokens in the request's prompt."""

        def parse_request(raw: bytes, body: Any) -> tuple[str, pb.TokenizeRequest]:
            parsed = self._parser.salted(ResponsesRequest, request, raw, body)
            chat, _, _ = self._parser.chat_of_response(request, parsed)
            salt = parsed.cache_salt.encode()
            return parsed.model, pb.TokenizeRequest(prompt=chat.prompts()[0], tenant_salt=salt)

        apart = self._conversations.is_large(self.keys.tenant(request.scope))
        model, asked = await self.bodies.read(request, parse_request, apart)
        found = await tokenize(self._models.worker(model), asked)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": found["count"]})
