"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

import grpc
from kvsidecar.errors import InvalidRequest, UnsupportedOption, from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import BaseModel, ConfigDict, Field

from inference_svc.gateway.messages import Message
from inference_svc.gateway.router import Worker
from inference_svc.gateway.tools import Tool

_PATIENCE_SECONDS = 60.0


class TokenizeBody(BaseModel):
    """A text, or a conversation as the model's template writes it."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def to_grpc(self) -> pb.Prompt:
        """Raises InvalidRequest, UnsupportedOption."""
        for name, only in (
            ("add_special_tokens", self.messages is None),
            ("add_generation_prompt", True),
            ("return_token_strs", False),
        ):
            if getattr(self, name) not in (None, only):
                raise UnsupportedOption(f"{name} can only be {str(only).lower()} here; leave it out", param=name)
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("one of prompt and messages must be set", param="prompt")
        if self.prompt is not None:
            return pb.Prompt(text=self.prompt)
        messages = [m.to_grpc(i) for i, m in enumerate(self.messages or ())]
        return pb.Prompt(chat=pb.Chat(messages=messages, tools=[tool.to_grpc() for tool in self.tools or ()]))


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
