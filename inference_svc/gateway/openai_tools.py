"""Tool schemas in OpenAI's format (https://platform.openai.com/docs/guides/function-calling)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.chat_messages import Message


class Function(BodyModel):
    """A function.

    If ``tool_choice`` requires a call, a grammar makes the call's arguments follow ``parameters``. If the model decides
    itself to call a function, the grammar applies only to a ``strict`` function.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BodyModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function

    def to_grpc(self) -> pb.Tool:
        f = self.function
        return pb.Tool(
            name=f.name,
            description=f.description or "",
            parameters=to_json("tools", f.parameters) if f.parameters else "",
            strict=bool(f.strict),
        )


Tools = Annotated[list[Tool], FIRST_ERROR]


class FunctionName(BodyModel):
    """The name of the function to call."""

    name: str


class NamedTool(BodyModel):
    """``tool_choice`` that names one function."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolNames(BodyModel):
    """The field ``allowed_tools`` of a ``tool_choice``."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FIRST_ERROR] = Field(min_length=1)


class AllowedTools(BodyModel):
    """``tool_choice`` that allows some of the tools; the prompt still contains all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


def to_chat(
    messages: list[Message],
    tools: list[Tool] | None,
    template_arguments: dict[str, Any] | None,
    start: pb.AnswerStart.ValueType,
) -> pb.Chat:
    """Convert a conversation to the worker's protocol. Raises InvalidRequest."""
    return pb.Chat(
        messages=[m.to_grpc(i) for i, m in enumerate(messages)],
        tools=[tool.to_grpc() for tool in tools or ()],
        template_arguments=to_json("chat_template_kwargs", template_arguments) if template_arguments else "",
        answer_start=start,
    )


def to_json(name: str, value: dict[str, Any]) -> str:
    """Encode a value as JSON. Raises InvalidRequest, which names the option ``name``."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(f"{name} is nested too deeply", param=name) from error


def tool_use(choice: ToolChoice | None, parallel: bool | None, any_tools: bool) -> pb.ToolUse | None:
    """Convert ``tool_choice``, which is None for the default. Raises InvalidRequest."""
    if not any_tools:
        if choice in (None, "none", "auto"):
            return None
        raise InvalidRequest("tool_choice demands a call and tools is empty; name the tools", param="tool_choice")
    modes = {"none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}
    if isinstance(choice, NamedTool):
        return pb.ToolUse(mode=pb.TOOL_MODE_REQUIRED, name=choice.function.name, single=True)
    if isinstance(choice, AllowedTools):
        mode = modes.get(choice.allowed_tools.mode, pb.TOOL_MODE_UNSPECIFIED)
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        return pb.ToolUse(mode=mode, allowed=names, single=parallel is False)
    return pb.ToolUse(mode=modes.get(choice or "", pb.TOOL_MODE_UNSPECIFIED), single=parallel is False)


def call_delta_fields(deltas: list[pb.ToolCallDelta], legacy: bool) -> dict[str, Any]:
    """Return the fields of a stream's delta: ``tool_calls``, or ``function_call`` in OpenAI's oldest format."""
    if not legacy:
        return {"tool_calls": call_deltas(deltas)}
    name = {"name": deltas[0].name} if deltas[0].name else {}
    return {"function_call": {**name, "arguments": "".join(d.arguments for d in deltas)}}


def whole_calls(calls: list[pb.ToolCall]) -> list[dict[str, Any]]:
    """Return ``tool_calls`` of a complete message."""
    return [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]


def call_deltas(deltas: list[pb.ToolCallDelta]) -> list[dict[str, Any]]:
    """Return ``tool_calls`` of a stream chunk. Only the first delta of a call has the call's id and name."""
    out: list[dict[str, Any]] = []
    for d in deltas:
        if d.name:
            function = {"name": d.name, "arguments": d.arguments}
            out.append({"index": d.index, "id": d.id, "type": "function", "function": function})
        else:
            out.append({"index": d.index, "function": {"arguments": d.arguments}})
    return out
