"""``/tokenize`` and ``/detokenize``, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

import grpc
from kvsidecar.errors import InvalidRequest, UnsupportedOption, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.chat_messages import Messages, answer_start
from inference_svc.gateway.openai_tools import Tools, to_chat
from inference_svc.gateway.unsupported_options import parse
from inference_svc.gateway.worker_router import Worker

_TIMEOUT_SECONDS = 60.0


class TokenizeBody(BodyModel):
    """Body of ``/tokenize``: a text, or a conversation for the model's chat template."""

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
        """Convert to a Prompt. Raises InvalidRequest, UnsupportedOption."""
        for name, refused in (
            ("add_special_tokens", bool(self.messages and self.add_special_tokens)),
            ("return_token_strs", bool(self.return_token_strs)),
        ):
            if refused:
                raise UnsupportedOption(f"{name} can only be false here; leave it out", param=name)
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("one of prompt and messages must be set", param="prompt")
        if self.prompt is not None:
            return pb.Prompt(text=self.prompt, without_special_tokens=self.add_special_tokens is False)
        start = answer_start(self.add_generation_prompt is not False, self.continue_final_message)
        return pb.Prompt(chat=to_chat(self.messages or [], self.tools, self.chat_template_kwargs, start))


class DetokenizeBody(BodyModel):
    """Body of ``/detokenize``."""

    model: str = ""
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], FIRST_ERROR]


def to_tokenize(raw: bytes, body: Any) -> tuple[str, pb.TokenizeRequest]:
    """Return a body's model and its worker request. Raises KVSidecarError."""
    parsed = parse(TokenizeBody, raw, body)
    return parsed.model, pb.TokenizeRequest(prompt=parsed.to_grpc())


def to_detokenize(raw: bytes, body: Any) -> tuple[str, pb.DetokenizeRequest]:
    """Return the model and the worker request of a ``/detokenize`` body. Raises KVSidecarError."""
    parsed = parse(DetokenizeBody, raw, body)
    return parsed.model, pb.DetokenizeRequest(token_ids=parsed.tokens)


async def tokenize(worker: Worker, request: pb.TokenizeRequest) -> dict[str, Any]:
    """Answer ``/tokenize``. Raises KVSidecarError."""
    try:
        found = await worker.client.stub.Tokenize(request, timeout=_TIMEOUT_SECONDS)
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    tokens = list(found.token_ids)
    limit = worker.model.context_length
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}


async def detokenize(worker: Worker, request: pb.DetokenizeRequest) -> dict[str, Any]:
    """Answer ``/detokenize``. Raises KVSidecarError."""
    try:
        found = await worker.client.stub.Detokenize(request, timeout=_TIMEOUT_SECONDS)
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    return {"prompt": found.text}
