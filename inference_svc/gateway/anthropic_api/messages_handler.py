"""Handler of ``/v1/messages``: whole and streamed messages."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.answer_services import AnswerServices
from inference_svc.gateway.anthropic_api.error_envelope import request_id_of
from inference_svc.gateway.anthropic_api.message_writer import MessageWriter, message_id
from inference_svc.gateway.anthropic_api.messages_request import MessagesRequest
from inference_svc.gateway.client_disconnect import cancel_on_disconnect
from inference_svc.gateway.prompt_fingerprint import PromptComparison, PromptFingerprint, earlier_id
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.request_runner import first_chunk, with_grammar_option
from inference_svc.gateway.server_sent_events import event_stream


class MessagesHandler:
    """Handler of the endpoint. One instance per process."""

    def __init__(self, services: AnswerServices) -> None:
        self._services = services

    async def create(self, request: Request) -> Response:
        """Answer a message, whole or as a stream of events."""
        request_id = request_id_of(request.scope)

        def parse_request(
            raw: bytes, body: Any
        ) -> tuple[MessagesRequest, pb.GenerateRequest, PromptFingerprint | None]:
            parsed = self._services.parser.salted(MessagesRequest, request, raw, body)
            self._services.models.check(parsed.model)
            chat = parsed.chat()
            asked = chat.to_grpc(chat.prompts()[0], request_id)
            asked.continuous_usage = parsed.stream
            self._services.runner.set_defaults([asked], self._services.models.resolve(parsed.model))
            compares = isinstance(parsed.diagnostics, dict)
            return parsed, asked, self._services.fingerprints.fingerprint(asked) if compares else None

        parsed, asked, prints = await self._services.bodies.read(request, parse_request)
        log_line().add(model=parsed.model, skipped_tools=parsed.skipped_tools())
        writer = MessageWriter(parsed, request_id, self._compare_messages(request, parsed, asked, prints))
        pieces = with_grammar_option(
            "output_config.format", self._services.run(request, [asked], not parsed.stream, message_id(request_id))
        )
        if parsed.stream:
            return event_stream(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        return JSONResponse(await cancel_on_disconnect(request, writer.whole(pieces)))

    def _compare_messages(
        self, request: Request, parsed: MessagesRequest, asked: pb.GenerateRequest, prints: PromptFingerprint | None
    ) -> PromptComparison | None:
        """Compare a request with the earlier message that its ``diagnostics`` names, and keep its fingerprint.

        Returns None for a request without ``diagnostics``, which has no fingerprint.
        """
        if prints is None:
            return None
        tenant = self._services.keys.tenant(request.scope)
        earlier = earlier_id(parsed.diagnostics, "previous_message_id")
        comparison = self._services.fingerprints.compare(tenant, parsed.cache_salt, prints, earlier)
        self._services.fingerprints.keep(tenant, parsed.cache_salt, message_id(asked.request_id), prints)
        return comparison
