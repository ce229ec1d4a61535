"""``/v1/messages/count_tokens``: counts the tokens of a conversation's prompt."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.anthropic_api.messages_request import CountTokensRequest
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.request_parser import RequestParser
from inference_svc.gateway.served_models import ServedModels
from inference_svc.gateway.tokenize_routes import tokenize


class CountTokens:
    """Handler of the endpoint. One instance per process."""

    def __init__(self, bodies: BodyReader, parser: RequestParser, models: ServedModels) -> None:
        self._bodies, self._parser, self._models = bodies, parser, models

    async def count(self, request: Request) -> Response:
        """Count the tokens of the prompt that ``/v1/messages`` would build from this body."""

        def parse_request(raw: bytes, body: Any) -> tuple[str, pb.TokenizeRequest]:
            parsed = self._parser.salted(CountTokensRequest, request, raw, body)
            return parsed.model, pb.TokenizeRequest(prompt=parsed.prompt(), tenant_salt=parsed.cache_salt.encode())

        model, asked = await self._bodies.read(request, parse_request)
        return JSONResponse({"input_tokens": (await tokenize(self._models.worker(model), asked))["count"]})
