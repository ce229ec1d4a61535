"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

import grpc
from kvsidecar.errors import InvalidRequest, UnsupportedOption, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import BaseModel, ConfigDict, Field

from inference_svc.gateway.messages import Messages, answer_start
from inference_svc.gateway.router import Worker
from inference_svc.gateway.tools import Tool, to_chat

_PATIENCE_SECONDS = 60.0


class TokenizeBody(BaseModel):
    """A text, or a conversation as the model's template writes it."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def to_grpc(self) -> pb.Prompt:
        """Raises InvalidRequest, UnsupportedOption."""
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


class DetokenizeBody(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    tokens: list[Annotated[int, Field(ge=0, lt=2**32)]]


async def tokenize(worker: Worker, body: TokenizeBody) -> dict[str, Any]:
    """The answer to a body of ``/tokenize``. Raises KVSidecarError."""
    request = pb.TokenizeRequest(prompt=body.to_grpc())
    try:
        found = await worker.client.stub.Tokenize(request, timeout=_PATIENCE_SECONDS)
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    tokens = list(found.token_ids)
    limit = worker.model.context_length
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}


async def detokenize(worker: Worker, body: DetokenizeBody) -> dict[str, Any]:
    """The answer to a body of ``/detokenize``. Raises KVSidecarError."""
    request = pb.DetokenizeRequest(token_ids=body.tokens)
    try:
        found = await worker.client.stub.Detokenize(request, timeout=_PATIENCE_SECONDS)
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    return {"prompt": found.text}
