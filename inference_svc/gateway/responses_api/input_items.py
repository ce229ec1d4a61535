"""Items of ``/v1/responses`` and ``/v1/conversations``, and their conversion to chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.chat_messages import RefusalPart

_ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "cto",
}  # fmt: skip


class Part(BodyModel):
    """A text part of a message. Parts of an earlier answer may have ``annotations``, ``parsed`` and ``logprobs``."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], FIRST_ERROR] | None = None
    parsed: Any = None
    logprobs: Annotated[list[Any], FIRST_ERROR] | None = None
    prompt_cache_breakpoint: Any = None


Parts = Annotated[list[Part], FIRST_ERROR]


class _Item(BodyModel):
    id: str | None = None
    status: str | None = None
    created_by: str | None = None


class _ToolItem(_Item):
    """Base of the items of tool calls. The fields of this class have no effect."""

    caller: Any = None
    namespace: str | None = None
    is_async: Any = Field(default=None, alias="async")
    async_: Any = None  # the name in the SDK's ``model_dump()``


class MessageItem(_Item):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part | RefusalPart], FIRST_ERROR]
    phase: str | None = None


class CallItem(_ToolItem):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None


class CustomCallItem(_ToolItem):
    """A call of a ``custom`` tool, whose input is text. Only histories from other servers contain such calls."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class ResultItem(_ToolItem):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    name: str | None = None
    output: str | Parts


class ReasoningItem(_Item):
    """Reasoning of an earlier answer; the chat template decides whether the prompt contains it."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], FIRST_ERROR] | None = None
    content: Annotated[list[Any], FIRST_ERROR] | None = None
    encrypted_content: str | None = None

    def text(self) -> str:
        """Return the reasoning text; empty if the item has only a summary or an encrypted text."""
        parts = [part.get("text") for part in self.content or () if isinstance(part, dict)]
        return "".join(text for text in parts if isinstance(text, str))


class ItemReference(BodyModel):
    """Reference to an item of a stored response; the gateway replaces the reference by the item."""

    type: Literal["item_reference"] | None = None
    id: str


class HostedItem(BaseModel):
    """A step of a tool that ran on another server; the prompt leaves it out."""

    type: Literal[
        "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_list_tools",
        "mcp_call", "mcp_approval_request", "mcp_approval_response", "local_shell_call", "local_shell_call_output",
        "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "tool_search_call",
        "tool_search_output",
    ]  # fmt: skip
    id: str | None = None


Item = MessageItem | CallItem | CustomCallItem | ResultItem | ReasoningItem | HostedItem
InputItem = Item | ItemReference
ITEM: TypeAdapter[Item] = TypeAdapter(Item)


def to_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Convert items to chat messages.

    Reasoning belongs to the assistant's turn that follows it; items of hosted tools may be between them. Consecutive
    reasoning items become one text. Reasoning without such a turn is left out.
    """
    found: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in items:
        if isinstance(item, HostedItem):
            continue
        if isinstance(item, ReasoningItem):
            if text := item.text():
                thoughts.append(text)
            continue
        if isinstance(item, MessageItem):
            found.append({"role": item.role, "content": _content(item.content)})
        elif isinstance(item, ResultItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        else:
            if thoughts:  # a call after reasoning begins a new turn
                found.append({"role": "assistant", "content": None})
            arguments = item.arguments if isinstance(item, CallItem) else json.dumps({"input": item.input})
            add_call(found, item.call_id, item.name, arguments)
        if thoughts and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = "\n\n".join(thoughts)
        thoughts.clear()
    return found


def add_call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    """Add a call to the last message, or append an assistant's message with the call."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def listed(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return items as the API lists them: with an id, a status, and content in parts."""
    found = []
    for item in items:
        body = item.model_dump(exclude_none=True, by_alias=True)
        body.setdefault("id", f"{_ID_PREFIXES.get(item.type, 'item')}_{token_hex(12)}")
        body.setdefault("status", "completed")
        if isinstance(item, MessageItem) and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
            body["content"] = [{"type": kind, "text": item.content, **more}]
        found.append(body)
    return found


def _content(content: str | Sequence[Part | RefusalPart]) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: as parts if a cache breakpoint ends one of them, otherwise as text."""
    if isinstance(content, str) or not any(isinstance(part.prompt_cache_breakpoint, dict) for part in content):
        return _text(content)
    return [
        {"type": "text", "text": part.text, "prompt_cache_breakpoint": part.prompt_cache_breakpoint} for part in content
    ]


def _text(content: str | Sequence[Part | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
