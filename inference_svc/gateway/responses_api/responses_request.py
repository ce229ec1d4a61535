"""Schemas of ``/v1/responses``, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from kvsidecar.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict, Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.cache_hints import CacheFields
from inference_svc.gateway.chat_messages import TextAlone
from inference_svc.gateway.openai_requests import DEFAULT_LENGTH, MAX_LOGPROBS, ChatRequest
from inference_svc.gateway.response_format import JsonSchema
from inference_svc.gateway.responses_api.input_items import InputItem, Item, ItemReference, MessageItem

_AS_IN_CHATS = (
    "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos",
    "chat_template_kwargs",
)  # fmt: skip
_FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}  # those of a chat's function


class FunctionTool(BodyModel):
    """A function tool. The fields after ``strict`` have no effect."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None
    is_async: Any = Field(default=None, alias="async")


class SkippedTool(BaseModel):
    """A tool that the prompt leaves out, because it runs on OpenAI's servers or its calls are not JSON."""

    model_config = ConfigDict(extra="allow")
    type: Literal[
        "custom", "namespace", "web_search", "web_search_2025_08_26", "web_search_preview",
        "web_search_preview_2025_03_11", "local_shell", "shell", "apply_patch", "tool_search", "mcp",
    ]  # fmt: skip


class NamedFunction(BodyModel):
    """``tool_choice`` that names one function."""

    type: Literal["function"]
    name: str


class AllowedFunctions(BodyModel):
    """``tool_choice`` that allows some of the functions; the prompt still contains all functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction | SkippedTool], FIRST_ERROR]


class ConversationId(BodyModel):
    """``conversation`` as an object."""

    id: str


class Format(JsonSchema):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]


class Text(BodyModel):
    """``text``."""

    format: Format | None = None
    verbosity: Any = None


class ResponsesRequest(CacheFields):
    """Body of ``/v1/responses``."""

    model: str = ""
    input: Annotated[str | Annotated[list[InputItem], FIRST_ERROR], TextAlone]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description=DEFAULT_LENGTH)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """vLLM's option, as are the next seven; all have the same meaning as in chats."""
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | Annotated[list[str], FIRST_ERROR] | None = None
    ignore_eos: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool | SkippedTool], FIRST_ERROR] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Without effect: OpenAI limits only calls of tools that run on its servers."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    """Return at once and generate the answer in the background; the client polls ``/v1/responses/ID``."""
    enable_response_messages: bool = False
    """vLLM's option: return the rendered prompt and the raw answer, each as text and token ids."""
    include: Any = None
    """Only the value ``message.output_text.logprobs`` has an effect."""
    reasoning: Any = None
    """Only ``effort`` has an effect: it is an argument of the chat template."""
    image: Any = None
    access_programs: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    explain: bool = False
    """Report which parts of the prompt were cached, and the miss reason."""

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation; None without one. Raises InvalidRequest if ``previous_response_id`` is set, too."""
        if self.conversation is None:
            return None
        if self.previous_response_id is not None:
            raise InvalidRequest(
                "conversation and previous_response_id are both set; each continues another history",
                param="conversation",
            )
        return self.conversation if isinstance(self.conversation, str) else self.conversation.id

    def check_background(self) -> None:
        """Raise InvalidRequest for a background response whose result the client could not read."""
        if not self.background:
            return
        if self.store is False:
            raise InvalidRequest("background can only be used when `store` is true", param="background")
        if self.stream:
            raise InvalidRequest(
                "background and stream are both set; leave stream out, and poll the response", param="background"
            )

    @property
    def item_references(self) -> list[str]:
        """Ids of the stored items that the input refers to, each as often as it does."""
        if isinstance(self.input, str):
            return []
        return [item.id for item in self.input if isinstance(item, ItemReference)]

    def items(self, stored: Mapping[str, Item]) -> list[Item]:
        """Return the input's items. ``stored`` has those of ``item_references``, by id. Raises InvalidRequest."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        if not self.input:
            raise InvalidRequest("input is empty; at least one item is needed", param="input")
        return [stored[item.id] if isinstance(item, ItemReference) else item for item in self.input]

    @property
    def skipped_tools(self) -> list[str]:
        """Types of the tools that the prompt leaves out."""
        return sorted({tool.type for tool in self.tools or () if isinstance(tool, SkippedTool)})

    @property
    def wants_logprobs(self) -> bool:
        included = isinstance(self.include, list) and "message.output_text.logprobs" in self.include
        return included or bool(self.top_logprobs)

    def chat(self, before: list[dict[str, Any]], said: list[dict[str, Any]]) -> ChatRequest:
        """Return the chat request: the earlier messages ``before``, then the input ``said``. Raises InvalidRequest."""
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
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
                **{name: getattr(self, name) for name in _AS_IN_CHATS},
                "tools": [
                    {"type": "function", "function": tool.model_dump(include=_FUNCTION_FIELDS)}
                    for tool in self.tools or ()
                    if isinstance(tool, FunctionTool)
                ],
                "tool_choice": self._choice(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self._format(),
                **{name: getattr(self, name) for name in CacheFields.model_fields},
                "explain": self.explain,
                "truncate": "left" if self.truncation == "auto" else None,
                "logprobs": self.wants_logprobs,
                "top_logprobs": self.top_logprobs,
                "reasoning_effort": self.reasoning.get("effort") if isinstance(self.reasoning, dict) else None,
                "prompt_cache_key": self.prompt_cache_key,
                "prompt_cache_options": self.prompt_cache_options,
                "prompt_cache_retention": self.prompt_cache_retention,
            }
        )

    def _choice(self) -> Any:
        if isinstance(self.tool_choice, NamedFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        if isinstance(self.tool_choice, AllowedFunctions):
            names = [tool.name for tool in self.tool_choice.tools if isinstance(tool, NamedFunction)]
            tools = [{"type": "function", "function": {"name": name}} for name in names]
            if not tools:
                raise InvalidRequest("tool_choice.tools names no function; name at least one", param="tool_choice")
            return {"type": "allowed_tools", "allowed_tools": {"mode": self.tool_choice.mode, "tools": tools}}
        return self.tool_choice

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            return {"type": wanted.type}
        return {"type": wanted.type, "json_schema": {"name": wanted.name, "schema": wanted.schema_}}
