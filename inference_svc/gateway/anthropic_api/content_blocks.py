"""Messages and content blocks of Anthropic's requests, and their conversion to chat messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from kvsidecar.errors import InvalidRequest, UnsupportedOption
from pydantic import BeforeValidator

from inference_svc.gateway.anthropic_api.cache_control import CacheControl
from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.chat_messages import check_count
from inference_svc.gateway.openai_tools import to_json

# The supported kinds of blocks. A block of another kind, such as an image, is refused with an error that names it.
_KINDS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"})
# Claude Code starts its system prompt with a header that differs in every request.
_BILLING_HEADER = re.compile(r"x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*;?)*\s*", re.ASCII)


class TextBlock(BodyModel):
    """A text. The client may send ``citations`` of an earlier answer back; they are not part of the prompt."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class ThinkingBlock(BodyModel):
    """Reasoning of an earlier answer; the chat template decides whether the prompt contains it."""

    type: Literal["thinking"]
    thinking: str = ""
    signature: str | None = None


class RedactedThinkingBlock(BodyModel):
    """Encrypted reasoning from another server's answer; the prompt leaves it out."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(BodyModel):
    """A tool call of an earlier answer, which the client sends back."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    toolset_name: str | None = None

    def call(self) -> dict[str, Any]:
        arguments = to_json("messages", self.input)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolReferenceBlock(BodyModel):
    """A tool that a tool search found. The prompt contains only its name here: it already describes all tools."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = None


class ToolResultBlock(BodyModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock | ToolReferenceBlock], FIRST_ERROR] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: str | None = None

    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else _joined([_shown(part) for part in parts])
        return f"Error: {text}" if self.is_error else text


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
TextBlocks = Annotated[list[TextBlock], FIRST_ERROR]


class InputMessage(BodyModel):
    """A message; ``clear_at`` and ``output_config`` of a system message have no effect."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FIRST_ERROR]
    clear_at: Any = None
    output_config: Any = None

    def chat_messages(self, place: int) -> list[dict[str, Any]]:
        """Convert the message at index ``place``. Raises InvalidRequest."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        allowed = {"user": ToolResultBlock, "assistant": ToolUseBlock}.get(self.role)
        for i, block in enumerate(self.content):
            if isinstance(block, ToolUseBlock | ToolResultBlock) and not isinstance(block, allowed or ()):
                where = f"messages.{place}.content.{i}"
                raise InvalidRequest(f"{where} is a {block.type} in a message of the role {self.role}", param=where)
        if self.role == "assistant":
            return [_answer(self.content)]
        return _said(self.role, self.content)

    @property
    def calls(self) -> bool:
        return any(isinstance(block, ToolUseBlock) for block in self.content)

    def marks(self) -> Iterator[CacheControl | None]:
        """Yield the ``cache_control`` of each block; None for a block without one."""
        for block in self.content if isinstance(self.content, list) else ():
            yield getattr(block, "cache_control", None)
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                yield from (part.cache_control for part in block.content)


def _answer(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return an assistant's message; its text blocks are joined without separators, as the model generated them."""
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    calls = [block.call() for block in blocks if isinstance(block, ToolUseBlock)]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    more = {"tool_calls": calls} if calls else {}
    return {"role": "assistant", "content": text, "reasoning_content": thought or None, **more}


def _said(role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Return the texts and tool results of a user or system message as chat messages, in the same order."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                found.append({"role": role, "content": _joined(texts)})
                texts = []
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text()})
    if texts or not found:
        found.append({"role": role, "content": _joined(texts)})
    return found


def system_text(system: str | list[TextBlock]) -> str:
    """Return the system prompt without Claude Code's header, which changes with every request."""
    first, *others = [system] if isinstance(system, str) else [block.text for block in system] or [""]
    return _joined([text for text in (without_billing_header(first), *others) if text])


def without_billing_header(text: str) -> str:
    """Remove Claude Code's billing header from the start of a text."""
    header = _BILLING_HEADER.match(text)
    return text if header is None else text[header.end() :]


def _shown(part: TextBlock | ToolReferenceBlock) -> str:
    return part.text if isinstance(part, TextBlock) else part.tool_name


def _joined(texts: list[str]) -> str:
    return "\n\n".join(texts)


def _checked(messages: Any) -> Any:
    """Check only the number of messages and the kinds of their blocks.

    Raises InvalidRequest for too many messages, and UnsupportedOption for an unsupported block, such as an image.
    """
    if not isinstance(messages, list):
        return messages
    check_count("messages", messages)
    for i, message in enumerate(messages):
        _check_kinds(f"messages.{i}", message)
    return messages


def _check_kinds(where: str, holder: Any) -> None:
    content = holder.get("content") if isinstance(holder, dict) else None
    for i, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        at = f"{where}.content.{i}"
        if isinstance(kind, str) and kind not in _KINDS:
            raise UnsupportedOption(
                f"{at} is of the type {kind[:40]!r}; this server reads text, tool_use, tool_result and thinking",
                param=at,
            )
        if kind == "tool_result":
            _check_kinds(at, block)


InputMessages = Annotated[list[InputMessage], FIRST_ERROR, BeforeValidator(_checked)]
