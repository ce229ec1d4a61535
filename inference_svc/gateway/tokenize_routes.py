"""``/tokenize`` and ``/detokenize``, as in vLLM."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import Response
from fastapi.responses import JSONResponse
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.chat_messages import Messages, answer_start
from inference_svc.gateway.openai_fields import json_bytes
from inference_svc.gateway.openai_tools import Tools, to_chat
from inference_svc.gateway.unsupported_options import parse
from inference_svc.gateway.worker_router import Worker

# The event loop converts and encodes up to this many tokens, which takes a few ms; a thread does more.
_INLINE_TOKENS = 4096


class TokenizeBody(BodyModel):
    """Body of ``/tokenize``: a text, or a conversation that the chat template renders."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def to_grpc(self) -> pb.Prompt:
        """Convert the body to a prompt. Raises InvalidRequest."""
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("one of prompt and messages must be set", param="prompt")
        if self.prompt is not None:
            return pb.Prompt(text=self.prompt, without_special_tokens=self.add_special_tokens is False)
        start = answer_start(self.add_generation_prompt is not False, self.continue_final_message)
        chat = to_chat(self.messages or [], self.tools, self.chat_template_kwargs, start)
        return pb.Prompt(chat=chat, with_special_tokens=bool(self.add_special_tokens))


class DetokenizeBody(BodyModel):
    """Body of ``/detokenize``."""

    model: str = ""
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], FIRST_ERROR]


def to_tokenize(raw: bytes, body: Any) -> tuple[str, pb.TokenizeRequest]:
    """Return a body's model and its worker request. Raises KVSidecarError."""
    parsed = parse(TokenizeBody, raw, body)
    return parsed.model, pb.TokenizeRequest(prompt=parsed.to_grpc(), return_token_names=bool(parsed.return_token_strs))


def to_detokenize(raw: bytes, body: Any) -> tuple[str, pb.DetokenizeRequest]:
    """Return the model and the worker request of a ``/detokenize`` body. Raises KVSidecarError."""
    parsed = parse(DetokenizeBody, raw, body)
    return parsed.model, pb.DetokenizeRequest(token_ids=parsed.tokens)


async def tokenize(worker: Worker, request: pb.TokenizeRequest) -> dict[str, Any]:
    """Return the fields of an answer of ``/tokenize``. Raises KVSidecarError."""
    found = await worker.call("Tokenize", request)
    count = len(found.token_ids)

    def fields() -> dict[str, Any]:
        # Comprehensions let other threads run between two elements; list() is one call.
        tokens = [token for token in found.token_ids]  # noqa: C416
        names = [name for name in found.token_names] if request.return_token_names else None  # noqa: C416
        return {"count": count, "max_model_len": worker.model.context_length, "tokens": tokens, "token_strs": names}

    return fields() if count <= _INLINE_TOKENS else await asyncio.to_thread(fields)


async def tokenize_response(worker: Worker, request: pb.TokenizeRequest) -> Response:
    """Answer ``/tokenize``. Raises KVSidecarError."""
    fields = await tokenize(worker, request)
    if fields["count"] <= _INLINE_TOKENS:
        return JSONResponse(fields)
    return Response(await asyncio.to_thread(json_bytes, fields), media_type="application/json")


async def tokenizer_info(worker: Worker) -> dict[str, Any]:
    """Answer ``/tokenizer_info``. Raises KVSidecarError."""
    found = await worker.call("GetTokenizer", pb.GetTokenizerRequest())
    config: dict[str, Any] = json.loads(found.config_json)
    return config


async def detokenize(worker: Worker, request: pb.DetokenizeRequest) -> dict[str, Any]:
    """Answer ``/detokenize``. Raises KVSidecarError."""
    found = await worker.call("Detokenize", request)
    return {"prompt": found.text}
