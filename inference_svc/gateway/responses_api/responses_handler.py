"""Handler of ``POST /v1/responses``: whole, streamed and background responses."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from secrets import token_hex
from typing import Any

from fastapi import Request, Response
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.answer_services import AnswerServices, without_answer
from inference_svc.gateway.client_disconnect import cancel_on_disconnect
from inference_svc.gateway.prompt_cache_options import is_prewarm, limit_to_prompt
from inference_svc.gateway.prompt_fingerprint import PromptFingerprint, earlier_id
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.request_runner import first_chunk, with_grammar_option
from inference_svc.gateway.responses_api.conversation_store import StoredResponse
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.server_sent_events import event_stream


class ResponsesHandler:
    """Handler of the endpoint. One instance per process."""

    def __init__(self, services: AnswerServices) -> None:
        self._services = services

    async def create(self, request: Request) -> Response:
        """Answer a response, whole, as a stream of events, or in the background."""
        tenant = self._services.keys.tenant(request.scope)
        apart = self._services.conversations.is_large(tenant)

        def parse_request(
            raw: bytes, body: Any
        ) -> tuple[ResponsesRequest, ResponseWriter, pb.GenerateRequest, PromptFingerprint]:
            parsed = self._services.parser.salted(ResponsesRequest, request, raw, body)
            self._services.models.check(parsed.model)
            parsed.check_background()
            chat, messages, given = self._services.parser.chat_of_response(request, parsed)
            model = self._services.models.answer_model(parsed.model)
            writer = ResponseWriter(parsed, model, partial(self._keep_response, tenant, parsed), messages, given)
            asked = chat.to_grpc(chat.prompts()[0], f"resp-{token_hex(12)}")
            self._services.runner.set_defaults([asked], self._services.models.resolve(model))
            if is_prewarm(parsed.prompt_cache_options):
                limit_to_prompt([asked])
            if parsed.enable_response_messages:
                asked.echo = asked.return_prompt_tokens = True
            prints = self._services.fingerprints.fingerprint(asked)
            earlier = earlier_id(parsed.prompt_cache_options, "comparison_response_id")
            if earlier is not None:
                writer.comparison = self._services.fingerprints.compare(tenant, parsed.cache_salt, prints, earlier)
            return parsed, writer, asked, prints

        parsed, writer, asked, prints = await self._services.bodies.read(request, parse_request, apart)
        if parsed.background:
            self._services.kept.background.check_capacity(tenant)
        self._services.fingerprints.keep(tenant, parsed.cache_salt, writer.id, prints)
        # The log gets the request's id: with the response's id, anyone who reads the log could continue the
        # conversation.
        log_line().add(id=asked.request_id, model=writer.model, skipped_tools=",".join(parsed.skipped_tools))
        pieces = with_grammar_option("text.format", self._services.run(request, [asked], not parsed.stream, writer.id))
        if is_prewarm(parsed.prompt_cache_options):
            pieces = without_answer(pieces)
        if parsed.background:
            queued = await self._services.kept.background.start(tenant, writer, pieces)
            return Response(queued, media_type="application/json")
        if parsed.stream:
            return event_stream(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        return Response(await cancel_on_disconnect(request, writer.whole(pieces)), media_type="application/json")

    async def _keep_response(self, tenant: Hashable, parsed: ResponsesRequest, stored: StoredResponse) -> None:
        # The conversation comes first: a request that is cancelled while it waits for a thread keeps nothing.
        if parsed.conversation_id is not None and not is_prewarm(parsed.prompt_cache_options):
            await self._services.kept.append(tenant, parsed.conversation_id, stored)
        if parsed.store is not False:
            self._services.conversations.keep(tenant, stored)
