"""Chat message schemas in OpenAI's format.

The schemas accept every field of an answer, because OpenAI's SDK sends earlier answers back.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from kvsidecar.cli.flags import did_you_mean
from kvsidecar.errors import InvalidRequest, UnsupportedOption
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.request_log import log_line

_MAX_MESSAGES = 4096
# Lifetimes of Anthropic's ``cache_control``.
EPHEMERAL_SECONDS, DEFAULT_EPHEMERAL_SECONDS = {"5m": 300, "1h": 3600}, 300

# Types of text parts in chats and in responses.
_TEXTS = frozenset(("text", "input_text", "output_text"))
_OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_LONGEST_NAME = 64  # a longer name is not compared with the known names
_MAX_COMPARED = 32  # unknown names of one object that are compared with the known names
_FIELD_NAME = re.compile(r"[a-z0-9_]{1,40}")
_ROLES = {"developer": "system", "function": "tool"}


def _members(of: type[BodyModel]) -> set[str]:
    return {field.alias or name for name, field in of.model_fields.items()}


class _MessageObject(BodyModel):
    """A message, or an object in one.

    Clients and proxies add members that no API has (``provider_specific_fields``, ``index``), and send them back. These
    members are dropped, with a note in the log. A member that is probably a misspelled name is refused.
    """

    place: ClassVar[str] = "messages"

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unknown(cls, value: Any) -> Any:
        known = _members(cls)
        if not isinstance(value, dict) or value.keys() <= known:
            return value
        unknown = [name for name in value if name not in known]
        kept = {name: value[name] for name in known if name in value}
        for name in unknown[:_MAX_COMPARED]:
            if _is_misspelled(name[:_LONGEST_NAME], cls):
                return kept | {name: value[name]}  # which pydantic refuses
        log_line().add(ignored_field=f"{cls.place}.{unknown[0] if _FIELD_NAME.fullmatch(unknown[0]) else 'other'}")
        return kept


@lru_cache(maxsize=1024)
def _is_misspelled(name: str, of: type[_MessageObject]) -> bool:
    """Return whether a name is almost that of a member. Real clients' names, such as ``reasoning_items``, are not."""
    return bool(did_you_mean(name, _members(of), cutoff=0.88))


class _Part(_MessageObject):
    """A part of a message. A cache breakpoint in Anthropic's or OpenAI's format may mark its end."""

    place: ClassVar[str] = "messages.content"

    text: str
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None

    def breakpoints(self) -> list[int | None]:
        """Return the retention of each breakpoint of the part in seconds; None means the request's own retention."""
        found: list[int | None] = []
        if isinstance(self.cache_control, dict):
            found.append(EPHEMERAL_SECONDS.get(str(self.cache_control.get("ttl")), DEFAULT_EPHEMERAL_SECONDS))
        if isinstance(self.prompt_cache_breakpoint, dict):
            found.append(None)
        return found


class TextPart(_Part):
    """A text part."""

    type: Literal["text"]


class RefusalPart(_Part):
    """A refusal in an assistant's message."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class CalledFunction(_MessageObject):
    """The function and arguments of a call. OpenAI's SDK adds ``parsed_arguments``, which has no effect."""

    place: ClassVar[str] = "messages.tool_calls.function"

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(_MessageObject):
    """A tool call in an assistant's message. Calls from a streamed answer have an ``index``."""

    place: ClassVar[str] = "messages.tool_calls"

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def to_grpc(self) -> pb.ToolCall:
        return pb.ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


def _no_typing_error(role: str) -> str:
    if role not in _OPENAI_ROLES and (hint := did_you_mean(role, _OPENAI_ROLES)):
        raise ValueError(f"not a role{hint}")
    return role


class Message(_MessageObject):
    """A chat message.

    A refusal is the text of an assistant's message without content. The prompt leaves out ``annotations`` of an earlier
    answer; the chat template decides whether it contains the answer's reasoning.
    """

    role: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"), AfterValidator(_no_typing_error)]
    """The chat template decides whether it accepts a role that OpenAI does not have."""
    content: str | Annotated[list[TextPart | RefusalPart], FIRST_ERROR] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], FIRST_ERROR] | None = None
    audio: None = None
    function_call: CalledFunction | None = None
    """A call in OpenAI's oldest format; a message of the role ``function`` has its result."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None

    @property
    def text(self) -> str:
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        return content or (self.refusal or "" if self.role == "assistant" else "")

    def to_grpc(self, place: int) -> pb.ChatMessage:
        """Convert the message; ``place`` is its index. Raises InvalidRequest for a message without content."""
        if self.content is None and not self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"messages.{place}.content is missing", param=f"messages.{place}.content")
        calls, call_id = list(self.tool_calls or ()), self.tool_call_id or ""
        if self.function_call is not None:
            calls.append(ToolCall(id=_legacy_id(self.function_call.name), function=self.function_call))
        if self.role == "function":
            call_id = _legacy_id(self.name or "")
        return pb.ChatMessage(
            role=_ROLES.get(self.role, self.role),
            content=self.text,
            tool_calls=[call.to_grpc() for call in calls],
            tool_call_id=call_id,
            name=self.name or "",
            reasoning=(self.reasoning_content or self.reasoning or "") if self.role == "assistant" else "",
        )


def _legacy_id(name: str) -> str:
    """Derive an id for a ``function_call``, which has none, from the function's name."""
    return f"call_{name}"


def check_count(name: str, messages: list[Any]) -> None:
    """Raise InvalidRequest for more messages than a request may have."""
    if len(messages) > _MAX_MESSAGES:
        raise InvalidRequest(f"{name} has {len(messages)} items; at most {_MAX_MESSAGES} are allowed", param=name)


def _checked(messages: Any, info: ValidationInfo) -> Any:
    """Check only the number of messages and the types of their parts.

    Raises InvalidRequest for too many messages, and UnsupportedOption for a part that is not text, such as an image.
    Only an assistant's message may have a refusal.
    """
    if not isinstance(messages, list):
        return messages
    check_count(str(info.field_name), messages)
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) and message.get("type") != "reasoning" else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            is_refusal = kind == "refusal" and message.get("role") == "assistant"
            if isinstance(kind, str) and kind not in _TEXTS and not is_refusal:
                where = f"{info.field_name}.{i}.content.{j}"
                raise UnsupportedOption(
                    f"{where} is of the type {kind[:40]!r}; the models of this server read text alone", param=where
                )
    return messages


TextAlone = BeforeValidator(_checked)
"""Annotation of a list of messages: an image causes one clear error instead of many errors about a text part."""
Messages = Annotated[list[Message], FIRST_ERROR, TextAlone]


def answer_start(generation_prompt: bool, goes_on: bool) -> pb.AnswerStart.ValueType:
    """Map vLLM's ``add_generation_prompt`` and ``continue_final_message`` to the protocol.

    Raises InvalidRequest.
    """
    if not goes_on:
        return pb.ANSWER_START_UNSPECIFIED if generation_prompt else pb.ANSWER_START_NOTHING
    if generation_prompt:
        raise InvalidRequest(
            "continue_final_message goes on with the last message; set add_generation_prompt to false with it",
            param="continue_final_message",
        )
    return pb.ANSWER_START_LAST_MESSAGE
