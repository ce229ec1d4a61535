"""Schemas of ``/v1/responses``, and their conversion to chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from kvsidecar.errors import InvalidRequest, UnsupportedOption
from pydantic import Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.cache_fields import CacheSession, CacheTtl
from inference_svc.gateway.chat_messages import TextAlone
from inference_svc.gateway.request_schema import DEFAULT_LENGTH, ChatRequest
from inference_svc.gateway.response_format import JsonSchema

# OpenAI's default, which has no effect.
_USUAL_EFFORT = ("effort", "medium")


class Part(BodyModel):
    """A text part of a message; answers that are sent back have ``annotations`` and ``logprobs``."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], FIRST_ERROR] | None = None
    logprobs: Annotated[list[Any], FIRST_ERROR] | None = None


Parts = Annotated[list[Part], FIRST_ERROR]


class _Item(BodyModel):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    phase: str | None = None


class CallItem(_Item):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None


class ResultItem(_Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(_Item):
    """Reasoning of an answer; not part of the prompt."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], FIRST_ERROR] | None = None
    content: Annotated[list[Any], FIRST_ERROR] | None = None
    encrypted_content: str | None = None


Item = MessageItem | CallItem | ResultItem | ReasoningItem


class FunctionTool(BodyModel):
    """A function tool; OpenAI's other tools run on its servers and are not supported."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(BodyModel):
    """``tool_choice`` of one function."""

    type: Literal["function"]
    name: str


class Format(JsonSchema):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]


class Text(BodyModel):
    """``text``."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(BodyModel):
    """Body of ``/v1/responses``."""

    model: str = ""
    input: Annotated[str | Annotated[list[Item], FIRST_ERROR], TextAlone]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description=DEFAULT_LENGTH)
    temperature: float | None = None
    top_p: float | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool], FIRST_ERROR] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[str], FIRST_ERROR] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    cache_salt: str = ""
    cache_ttl_seconds: CacheTtl = None
    cache_session: CacheSession = ""
    explain: bool = False
    """Report which parts of the prompt were cached."""

    def messages(self) -> list[dict[str, Any]]:
        """Return the input as chat messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidRequest("input is empty; at least one item is needed", param="input")
        found: list[dict[str, Any]] = []
        for item in self.input:
            if isinstance(item, MessageItem):
                found.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, ResultItem):
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            elif isinstance(item, CallItem):
                add_call(found, item.call_id, item.name, item.arguments)
        return found

    def chat(self, before: list[dict[str, Any]]) -> ChatRequest:
        """Return the chat request that continues ``before``. Raises InvalidRequest, UnsupportedOption."""
        reasoning = {name: asked for name, asked in (self.reasoning or {}).items() if (name, asked) != _USUAL_EFFORT}
        for name, asked in (("include", self.include or []), ("reasoning", reasoning.values())):
            if any(asked):
                raise UnsupportedOption(f"{name} is not supported by this server; leave it out", param=name)
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        said = self.messages()
        if not said and not before:
            raise InvalidRequest("input has no message; at least one is needed", param="input")
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": [*instructions, *before, *said],
                "stream": self.stream,
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [
                    {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()
                ],
                "tool_choice": self._choice(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self._format(),
                "cache_salt": self.cache_salt,
                "cache_ttl_seconds": self.cache_ttl_seconds,
                "cache_session": self.cache_session,
                "explain": self.explain,
            }
        )

    def _choice(self) -> Any:
        if isinstance(self.tool_choice, NamedFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            return {"type": wanted.type}
        return {"type": wanted.type, "json_schema": {"name": wanted.name, "schema": wanted.schema_}}


def add_call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    """Add a call to the assistant's last message, or as a new message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: str | Parts) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
