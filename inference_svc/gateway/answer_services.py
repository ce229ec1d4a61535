"""Objects and steps that the handlers of chats, completions, responses and messages share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import Request
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.explain_header import ACROSS_TENANTS, requested_explain
from inference_svc.gateway.prompt_cache_options import drop_answer
from inference_svc.gateway.prompt_fingerprint import FingerprintStore
from inference_svc.gateway.request_history import RequestHistory
from inference_svc.gateway.request_log import named_request_id
from inference_svc.gateway.request_parser import RequestParser
from inference_svc.gateway.request_runner import ChoiceChunk, RequestRunner
from inference_svc.gateway.responses_api.conversation_store import ConversationStore
from inference_svc.gateway.responses_api.stored_response_routes import StoredResponseRoutes
from inference_svc.gateway.served_models import ServedModels
from inference_svc.gateway.worker_wait import preferred_wait_seconds


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
    fingerprints: FingerprintStore = field(default_factory=FingerprintStore)

    async def run(
        self, request: Request, requests: list[pb.GenerateRequest], whole: bool, answer_id: str
    ) -> AsyncIterator[ChoiceChunk]:
        """Run the worker requests of an answer, and record the answer for ``kvsidecar why``."""
        across = requested_explain(request.headers) == ACROSS_TENANTS
        for asked in requests:
            asked.explain_across_tenants = across
        tenant, salt = self.keys.tenant(request.scope), requests[0].cache.tenant_salt.decode()
        ids = (answer_id, requests[0].request_id, named_request_id(request.scope))
        async for chunk in self.runner.run(requests, whole, preferred_wait_seconds(request.headers)):
            if chunk.part.finish_reason:
                self.history.add(tenant, salt, ids, requests[0].model, chunk.part)
            yield chunk


async def without_answer(pieces: AsyncIterator[ChoiceChunk]) -> AsyncIterator[ChoiceChunk]:
    """Yield the chunks of a prewarming request without the token that it generated."""
    async for piece in pieces:
        drop_answer(piece.part, pb.FINISH_REASON_STOP)
        yield piece
