"""Request handlers of the generating endpoints: chats, completions, responses and messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.anthropic_api.error_envelope import request_id_of
from inference_svc.gateway.anthropic_api.message_writer import MessageWriter, message_id
from inference_svc.gateway.anthropic_api.messages_schema import MessagesRequest
from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.client_disconnect import cancel_on_disconnect
from inference_svc.gateway.explain_header import ACROSS_TENANTS, requested_explain
from inference_svc.gateway.openai_writer import OpenAIWriter
from inference_svc.gateway.prompt_cache_options import drop_answer, is_prewarm, limit_to_prompt
from inference_svc.gateway.prompt_fingerprint import FingerprintStore, PromptComparison, PromptFingerprint, earlier_id
from inference_svc.gateway.request_history import RequestHistory
from inference_svc.gateway.request_log import log_line, named_request_id
from inference_svc.gateway.request_parser import RequestParser
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
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_schema import ResponsesRequest
from inference_svc.gateway.responses_api.stored_response_routes import StoredResponseRoutes
from inference_svc.gateway.served_models import ServedModels
from inference_svc.gateway.worker_wait import preferred_wait_seconds


@dataclass(frozen=True)
class _AnswerJob:
    """A parsed request, and one worker request for each of its answers."""

    answer_id: str
    model: str
    parsed: ChatRequest | CompletionRequest
    requests: list[pb.GenerateRequest]


@dataclass(frozen=True)
class AnswerServices:
    """Objects of a gateway that the answer handlers use."""

    keys: ApiKeys
    bodies: BodyReader
    parser: RequestParser
    models: ServedModels
    runner: RequestRunner
    conversations: ConversationStore
    kept: StoredResponseRoutes
    history: RequestHistory


class AnswerHandlers:
    """Handlers of one gateway, one method per endpoint."""

    def __init__(self, services: AnswerServices) -> None:
        self._keys, self._bodies, self._parser = services.keys, services.bodies, services.parser
        self._models, self._runner, self._history = services.models, services.runner, services.history
        self._conversations, self._kept = services.conversations, services.kept
        self._fingerprints = FingerprintStore()

    async def chat(self, request: Request) -> Response:
        return await self._answer(
            request, await self._bodies.read(request, partial(self._parse_job, ChatRequest, request))
        )

    async def complete(self, request: Request) -> Response:
        asked = await self._bodies.read(request, partial(self._parse_job, CompletionRequest, request))
        return await self._answer(request, asked)

    async def invoke(self, request: Request) -> Response:
        """Answer at SageMaker's path: a body with ``messages`` is a chat, any other a completion."""

        def parse_job(raw: bytes, body: Any) -> _AnswerJob:
            is_chat = isinstance(body, dict) and "messages" in body
            return self._parse_job(ChatRequest if is_chat else CompletionRequest, request, raw, body)

        return await self._answer(request, await self._bodies.read(request, parse_job))

    async def respond(self, request: Request) -> Response:
        tenant = self._keys.tenant(request.scope)
        apart = self._conversations.is_large(tenant)

        def parse_request(
            raw: bytes, body: Any
        ) -> tuple[ResponsesRequest, ResponseWriter, pb.GenerateRequest, PromptFingerprint]:
            parsed = self._parser.salted(ResponsesRequest, request, raw, body)
            self._models.check(parsed.model)
            parsed.check_background()
            chat, messages, given = self._parser.chat_of_response(request, parsed)
            model = self._models.answer_model(parsed.model)
            writer = ResponseWriter(parsed, model, partial(self._keep_response, tenant, parsed), messages, given)
            asked = chat.to_grpc(chat.prompts()[0], 0, f"resp-{token_hex(12)}")
            self._runner.set_defaults([asked], self._models.resolve(model))
            if is_prewarm(parsed.prompt_cache_options):
                limit_to_prompt([asked])
            if parsed.enable_response_messages:
                asked.echo = asked.return_prompt_tokens = True
            prints = self._fingerprints.fingerprint(asked)
            earlier = earlier_id(parsed.prompt_cache_options, "comparison_response_id")
            if earlier is not None:
                writer.comparison = self._fingerprints.compare(tenant, parsed.cache_salt, prints, earlier)
            return parsed, writer, asked, prints

        parsed, writer, asked, prints = await self._bodies.read(request, parse_request, apart)
        if parsed.background:
            self._kept.background.check_capacity(tenant)
        self._fingerprints.keep(tenant, parsed.cache_salt, writer.id, prints)
        # The log gets the request's id: with the response's id, anyone who reads the log could continue the
        # conversation.
        log_line().add(id=asked.request_id, model=writer.model, skipped_tools=",".join(parsed.skipped_tools))
        pieces = with_grammar_option("text.format", self._run(request, [asked], not parsed.stream, writer.id))
        if is_prewarm(parsed.prompt_cache_options):
            pieces = _without_answer(pieces)
        if parsed.background:
            queued = await self._kept.background.start(tenant, writer, pieces)
            return Response(queued, media_type="application/json")
        if parsed.stream:
            return _events(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        return Response(await cancel_on_disconnect(request, writer.whole(pieces)), media_type="application/json")

    async def create_message(self, request: Request) -> Response:
        request_id = request_id_of(request.scope)

        def parse_request(raw: bytes, body: Any) -> tuple[MessagesRequest, pb.GenerateRequest]:
            parsed = self._parser.salted(MessagesRequest, request, raw, body)
            self._models.check(parsed.model)
            chat = parsed.chat()
            asked = chat.to_grpc(chat.prompts()[0], 0, request_id)
            asked.continuous_usage = parsed.stream
            self._runner.set_defaults([asked], self._models.resolve(parsed.model))
            return parsed, asked

        parsed, asked = await self._bodies.read(request, parse_request)
        log_line().add(model=parsed.model, skipped_tools=parsed.skipped_tools())
        writer = MessageWriter(parsed, request_id, self._compare_messages(request, parsed, asked))
        pieces = with_grammar_option(
            "output_config.format", self._run(request, [asked], not parsed.stream, message_id(request_id))
        )
        if parsed.stream:
            return _events(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        return JSONResponse(await cancel_on_disconnect(request, writer.whole(pieces)))

    def _keep_response(self, tenant: Hashable, parsed: ResponsesRequest, stored: StoredResponse) -> None:
        if parsed.store is not False:
            self._conversations.keep(tenant, stored)
        if parsed.conversation_id is not None and not is_prewarm(parsed.prompt_cache_options):
            items = [*json.loads(stored.items), *json.loads(stored.response)["output"]]
            self._kept.append(tenant, parsed.conversation_id, items)

    def _parse_job(self, kind: type[GenerationOptions], request: Request, raw: bytes, body: Any) -> _AnswerJob:
        """Convert a body to worker requests. Raises KVSidecarError.

        Runs in a thread for a large body.
        """
        parsed: Any = self._parser.salted(kind, request, raw, body)
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
        self._runner.set_defaults(requests, self._models.resolve(model))
        if is_prewarm(parsed.prompt_cache_options):
            limit_to_prompt(requests)
        return _AnswerJob(answer_id, model, parsed, requests)

    async def _answer(self, request: Request, asked: _AnswerJob) -> Response:
        parsed, requests = asked.parsed, asked.requests
        log_line().add(id=asked.answer_id, model=asked.model)
        writer = OpenAIWriter(asked.answer_id, asked.model, self._models.fingerprint(asked.model), parsed)
        shared = request_logprobs_once(requests, parsed.num_choices)
        pieces = with_grammar_option(
            parsed.grammar[0], self._run(request, requests, not parsed.stream, asked.answer_id)
        )
        if shared:
            pieces = share_prompt_logprobs(pieces, parsed.num_choices)
        if is_prewarm(parsed.prompt_cache_options):
            pieces = _without_answer(pieces)
        if parsed.stream:
            # Await the first chunk before the answer begins, so that a refused request gets its own status code.
            return _events(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        found = await cancel_on_disconnect(request, writer.whole(pieces, len(requests)))
        if requests[0].HasField("prompt_logprobs"):  # their JSON may have megabytes
            return await asyncio.to_thread(JSONResponse, found)
        return JSONResponse(found)

    def _compare_messages(
        self, request: Request, parsed: MessagesRequest, asked: pb.GenerateRequest
    ) -> PromptComparison | None:
        """Compare a request with the earlier message that its ``diagnostics`` names, and keep its fingerprint.

        Returns None for a request without ``diagnostics``.
        """
        if not isinstance(parsed.diagnostics, dict):
            return None
        tenant, found = self._keys.tenant(request.scope), self._fingerprints.fingerprint(asked)
        earlier = earlier_id(parsed.diagnostics, "previous_message_id")
        comparison = self._fingerprints.compare(tenant, parsed.cache_salt, found, earlier)
        self._fingerprints.keep(tenant, parsed.cache_salt, message_id(asked.request_id), found)
        return comparison

    async def _run(
        self, request: Request, requests: list[pb.GenerateRequest], whole: bool, answer_id: str
    ) -> AsyncIterator[ChoiceChunk]:
        """Run the worker requests of an answer, and record the answer for ``kvsidecar why``."""
        across = requested_explain(request.headers) == ACROSS_TENANTS
        for asked in requests:
            asked.explain_across_tenants = across
        tenant, salt = self._keys.tenant(request.scope), requests[0].cache.tenant_salt.decode()
        ids = (answer_id, requests[0].request_id, named_request_id(request.scope))
        async for chunk in self._runner.run(requests, whole, preferred_wait_seconds(request.headers)):
            if chunk.part.finish_reason:
                self._history.add(tenant, salt, ids, requests[0].model, chunk.part)
            yield chunk


async def _without_answer(pieces: AsyncIterator[ChoiceChunk]) -> AsyncIterator[ChoiceChunk]:
    async for piece in pieces:
        drop_answer(piece.part, pb.FINISH_REASON_STOP)
        yield piece


def _events(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
