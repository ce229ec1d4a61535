"""Schemas of ``/v1/messages`` and ``/v1/messages/count_tokens``, and their chat requests."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from inference_svc.gateway.anthropic_api.cache_control import CacheControl
from inference_svc.gateway.anthropic_api.content_blocks import (
    InputMessages,
    TextBlocks,
    system_text,
)
from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.cache_hints import MAX_BREAKPOINTS, CacheSession
from inference_svc.gateway.openai_requests import ChatRequest
from inference_svc.gateway.unsupported_options import IGNORED_OF_MESSAGES, NEUTRAL_OF_MESSAGES

_MAX_STOPS = 8
_TYPE_NAME = re.compile(r"[a-z0-9_]{1,40}")
_MAX_NOTED = 8


class FunctionTool(BodyModel):
    """A function tool. The last four options have no effect: the prompt always contains all tools."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None

    def to_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**function, "strict": self.strict}}


def _not_a_function(kind: str) -> str:
    if kind == "custom":
        raise ValueError("is for functions")
    return kind


class ServerTool(BaseModel):
    """A tool that Anthropic's servers run, such as ``web_search_20250305``. It is skipped and noted in the log."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, AfterValidator(_not_a_function)]
    cache_control: CacheControl | None = None


class ToolChoice(BodyModel):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_chat(self) -> str | dict[str, Any]:
        """Convert to a chat's ``tool_choice``. Raises InvalidRequest for ``tool`` without a name."""
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        if not self.name:
            raise InvalidRequest("tool_choice.name is missing; it names the tool to call", param="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(BodyModel):
    """``thinking``, which sets the chat template's ``enable_thinking``; budget and display have no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Any = None
    display: Any = None


class OutputFormat(BodyModel):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BodyModel):
    """``output_config``: ``effort`` and ``task_budget`` have no effect."""

    format: OutputFormat | None = None
    effort: Any = None
    task_budget: Any = None


class CountTokensRequest(BodyModel):
    """Body of ``/v1/messages/count_tokens``."""

    neutral_options: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_OF_MESSAGES
    ignored_options: ClassVar[Collection[str]] = IGNORED_OF_MESSAGES

    model: str
    messages: InputMessages = Field(min_length=1)
    system: str | TextBlocks | None = None
    tools: Annotated[list[FunctionTool | ServerTool], FIRST_ERROR] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of ``output_config.format``."""
    diagnostics: Any = None
    """``previous_message_id`` names an earlier message to compare with; other values have no effect."""
    explain: bool = False
    """Our extension: report the reason why tokens of the prompt were computed."""
    cache_salt: str = ""
    """Our extension: requests with different salts never share chunks."""

    def prompt(self) -> pb.Prompt:
        return self._chat({}).prompts()[0]

    def skipped_tools(self) -> str:
        """Return the types of the skipped tools, for the log."""
        kinds = dict.fromkeys(tool.type for tool in self.tools or () if isinstance(tool, ServerTool))
        return ",".join([kind if _TYPE_NAME.fullmatch(kind) else "other" for kind in kinds][:_MAX_NOTED])

    def _chat(self, options: dict[str, Any]) -> ChatRequest:
        """Build the chat request, with additional ``options``. Raises InvalidRequest, UnsupportedOption."""
        system = [] if self.system is None else [{"role": "system", "content": system_text(self.system)}]
        said = [found for i, message in enumerate(self.messages) for found in message.chat_messages(i)]
        last = self.messages[-1]
        goes_on = last.role == "assistant" and not last.calls
        kept = [] if self.thinking is None else [("enable_thinking", self.thinking.type != "disabled")]
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": [*system, *said],
                "tools": [tool.to_chat() for tool in self.tools or () if isinstance(tool, FunctionTool)],
                "chat_template_kwargs": dict(kept) or None,
                "add_generation_prompt": not goes_on,
                "continue_final_message": goes_on,
                **options,
            }
        )


class MessagesRequest(CountTokensRequest):
    """Body of ``/v1/messages``."""

    max_tokens: int = Field(ge=0, lt=2**31)
    """With 0, the worker prefills the prompt into the cache, and the answer is empty."""
    stream: bool = False
    stop_sequences: Annotated[list[str], FIRST_ERROR] | None = Field(default=None, max_length=_MAX_STOPS)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    cache_session: CacheSession = ""
    """Our extension, as in chats."""
    kv_hints: Any = None

    def chat(self) -> ChatRequest:
        """Return the chat request. Raises InvalidRequest, UnsupportedOption."""
        choice = self.tool_choice
        return self._chat(
            {
                "stream": self.stream,
                "max_tokens": self.max_tokens or 1,  # with 0, the answer omits this token
                "stop": self.stop_sequences,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "tool_choice": None if choice is None or not self.max_tokens else choice.to_chat(),
                "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
                "response_format": self._format(),
                "cache_salt": self.cache_salt,
                "cache_retain_seconds": None if self.cache_control is None else self.cache_control.seconds,
                "cache_breakpoints": self._breakpoints(),
                "cache_session": self.cache_session,
                "kv_hints": self.kv_hints,
                "explain": self.explain,
            }
        )

    @property
    def retain_seconds(self) -> int | None:
        """The longest retention that the request asks for; None without a breakpoint."""
        top = [] if self.cache_control is None else [self.cache_control.seconds]
        return max(top + [seconds for _, seconds in self._marks], default=None)

    def _breakpoints(self) -> list[dict[str, int]]:
        """Return the breakpoints as numbers of chat messages; beyond the maximum number, only the last ones."""
        by_end: dict[int, int] = {}
        for end, seconds in self._marks:
            by_end[end] = max(by_end.get(end, 0), seconds)
        return [{"messages": end, "retain_seconds": by_end[end]} for end in sorted(by_end)[-MAX_BREAKPOINTS:]]

    @cached_property
    def _marks(self) -> list[tuple[int, int]]:
        """A pair for each breakpoint in tools, system prompt and messages.

        A pair is the number of chat messages before the breakpoint, and its retention in seconds. ``chat`` runs
        beside the event loop and computes the pairs, because this takes long for a large body.
        """
        system = [block.cache_control for block in (self.system if isinstance(self.system, list) else ())]
        tools = [tool.cache_control for tool in self.tools or ()]
        if not any(isinstance(tool, FunctionTool) for tool in self.tools or ()):
            tools.clear()  # all tools are skipped, so nothing of the prompt is before these breakpoints
        # A breakpoint in a tool ends with the first message: chat templates write the tools beside that message.
        found = [(1, mark.seconds) for mark in (*system, *tools) if mark is not None]
        end = int(self.system is not None)
        for i, message in enumerate(self.messages):
            end += len(message.chat_messages(i))
            found += [(end, mark.seconds) for mark in message.marks() if mark is not None]
        return found

    def _format(self) -> dict[str, Any] | None:
        wanted = self.output_format or (self.output_config.format if self.output_config is not None else None)
        if wanted is None or not self.max_tokens:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema_}}
