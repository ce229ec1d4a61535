"""Request handlers of the generating endpoints: chats, completions, responses and messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

from fastapi import Request, Response
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.answer_services import AnswerServices, without_answer
from inference_svc.gateway.client_disconnect import cancel_on_disconnect
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest, GenerationOptions
from inference_svc.gateway.openai_writer import OpenAIWriter
from inference_svc.gateway.prompt_cache_options import is_prewarm, limit_to_prompt
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.request_runner import (
    first_chunk,
    request_logprobs_once,
    share_prompt_logprobs,
    with_grammar_option,
)
from inference_svc.gateway.server_sent_events import event_stream

# Maximum size of the options that the worker requests of all answers have together.
_MAX_OPTION_BYTES = 32 << 20


@dataclass(frozen=True)
class _AnswerJob:
    """A parsed request, and one worker request for each of its answers."""

    answer_id: str
    model: str
    parsed: ChatRequest | CompletionRequest
    requests: list[pb.GenerateRequest]


class CompletionHandlers:
    """Handlers of one gateway, one method per endpoint."""

    def __init__(self, services: AnswerServices) -> None:
        self._services = services

    async def chat(self, request: Request) -> Response:
        return await self._answer(
            request, await self._services.bodies.read(request, partial(self._parse_job, ChatRequest, request))
        )

    async def complete(self, request: Request) -> Response:
        asked = await self._services.bodies.read(request, partial(self._parse_job, CompletionRequest, request))
        return await self._answer(request, asked)

    async def invoke(self, request: Request) -> Response:
        """Answer at SageMaker's path: a body with ``messages`` is a chat, any other a completion."""

        def parse_job(raw: bytes, body: Any) -> _AnswerJob:
            is_chat = isinstance(body, dict) and "messages" in body
            return self._parse_job(ChatRequest if is_chat else CompletionRequest, request, raw, body)

        return await self._answer(request, await self._services.bodies.read(request, parse_job))

    def _parse_job(self, kind: type[GenerationOptions], request: Request, raw: bytes, body: Any) -> _AnswerJob:
        """Convert a body to worker requests. Raises KVSidecarError.

        Runs in a thread for a large body.
        """
        parsed: Any = self._services.parser.salted(kind, request, raw, body)
        self._services.models.check(parsed.model)
        model = self._services.models.answer_model(parsed.model)
        answer_id = ("chatcmpl-" if kind is ChatRequest else "cmpl-") + token_hex(12)
        prompts = parsed.prompts()
        if parsed.explain and len(prompts) * parsed.num_choices > 1:
            raise InvalidRequest("explain is for one answer; ask for one prompt with n = 1", param="explain")
        options = parsed.to_grpc(pb.Prompt(), "")
        _check_options(options, len(prompts) * parsed.num_choices)
        requests = [
            _answer_request(options, prompt, choice, f"{answer_id}-{i}-{choice}")
            for i, prompt in enumerate(prompts)
            for choice in range(parsed.num_choices)
        ]
        self._services.runner.set_defaults(requests, self._services.models.resolve(model))
        if is_prewarm(parsed.prompt_cache_options):
            limit_to_prompt(requests)
        return _AnswerJob(answer_id, model, parsed, requests)

    async def _answer(self, request: Request, asked: _AnswerJob) -> Response:
        parsed, requests = asked.parsed, asked.requests
        log_line().add(id=asked.answer_id, model=asked.model)
        writer = OpenAIWriter(asked.answer_id, asked.model, self._services.models.fingerprint(asked.model), parsed)
        shared = request_logprobs_once(requests, parsed.num_choices)
        pieces = with_grammar_option(
            parsed.grammar[0], self._services.run(request, requests, not parsed.stream, asked.answer_id)
        )
        if shared:
            pieces = share_prompt_logprobs(pieces, parsed.num_choices)
        if is_prewarm(parsed.prompt_cache_options):
            pieces = without_answer(pieces)
        if parsed.stream:
            # Await the first chunk before the answer begins, so that a refused request gets its own status code.
            return event_stream(writer.stream(await cancel_on_disconnect(request, first_chunk(pieces)), pieces))
        return await cancel_on_disconnect(request, writer.whole(pieces, len(requests)))


def _check_options(options: pb.GenerateRequest, num_answers: int) -> None:
    """Raise InvalidRequest if the options are too large to be sent with each of the answers' requests."""
    size = options.ByteSize()
    if size * num_answers > _MAX_OPTION_BYTES:
        raise InvalidRequest(
            f"the options have {size} bytes for each of {num_answers} answers; at most {_MAX_OPTION_BYTES} bytes are "
            "allowed for all answers together; send fewer prompts, or shorter lists of options"
        )


def _answer_request(options: pb.GenerateRequest, prompt: pb.Prompt, choice: int, request_id: str) -> pb.GenerateRequest:
    """Return the request of one answer. A copy of ``options`` takes far less time than their conversion."""
    request = pb.GenerateRequest()
    request.CopyFrom(options)
    request.prompt.CopyFrom(prompt)
    request.request_id = request_id
    if request.sampling.HasField("seed"):
        request.sampling.seed = (request.sampling.seed + choice) % 2**64
    return request
