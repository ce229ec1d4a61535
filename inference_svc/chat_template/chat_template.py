"""Chat template of one model; grammar and parser of its tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from transformers import PreTrainedTokenizerBase

from inference_svc.chat_template.reasoning_splitter import BEGIN, END, marks_reasoning, opens_reasoning
from inference_svc.chat_template.template_messages import (
    check_chat,
    messages_with_described_tools,
    template_arguments,
    template_messages,
    template_tools,
    uses_tools,
)
from inference_svc.context_reuse.text_structure import special_tokens
from inference_svc.sequence.detokenizer import CallMarkers, ReasoningMarkers
from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.tool_calls.tool_call_format import (
    CALLS,
    MARKERS,
    ToolCallFormat,
    format_of,
    parameters_schema,
    renders_tools,
)
from inference_svc.tool_calls.tool_call_parser import ToolCallParser
from inference_svc.tool_calls.tool_grammar import optional_calls_grammar, required_calls_grammar

_NOTHING: Mapping[int, str] = MappingProxyType({})


class ChatTemplate:
    """Chat template and tool calls of one model.

    Any thread may call the methods. For a bad request they raise InvalidRequest.
    """

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, grammars: GrammarCompiler, parser: str = "auto"
    ) -> None:
        """``parser`` names the format of the model's tool calls; ``auto`` detects the format in the chat template."""
        self._name, self._tokenizer, self._grammars = name, tokenizer, grammars
        template = self._template(True)
        self._dialect: ToolCallFormat = format_of(template) if parser == "auto" else parser  # type: ignore[assignment]
        self._knows_tools, self._marks_reasoning = renders_tools(template), marks_reasoning(template)
        special = set(special_tokens(tokenizer).values())
        self._reasons_by_special = self._marks_reasoning and not special.isdisjoint((BEGIN, END))
        self._marked_by_special = any(marker in special for marker in MARKERS[self._dialect])

    def _template(self, with_tools: bool) -> str | None:
        """Text of the chat template; some models have a separate template for tools."""
        template: Any = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use" if with_tools else "default") or next(iter(template.values()), None)
        return template if isinstance(template, str) else None

    def render(self, chat: pb.Chat, generation_prompt: bool, written: Mapping[int, str] = _NOTHING) -> str:
        """Render a conversation with the model's template.

        ``written`` maps the index of a message to a text that replaces its content and calls.
        """
        check_chat(chat)
        more, start = template_arguments(chat), chat.answer_start
        more["add_generation_prompt"] = generation_prompt and start == pb.ANSWER_START_UNSPECIFIED
        more["continue_final_message"] = start == pb.ANSWER_START_LAST_MESSAGE
        if not self._tokenizer.chat_template:
            raise InvalidRequest(f"{self._name} has no chat template; send text or token_ids instead", param="messages")
        if self._knows_tools or not uses_tools(chat):
            return self._written(template_messages(chat, self._dialect, written), template_tools(chat), more)
        try:
            return self._written(messages_with_described_tools(chat, True, written), [], more)
        except InvalidRequest:
            if chat.messages[0].role == "system":
                raise
        # Some templates support no system message.
        return self._written(messages_with_described_tools(chat, False, written), [], more)

    def text_of_first(self, chat: pb.Chat, messages: int) -> str:
        """Render the first ``messages`` messages; return an empty text if the template refuses them."""
        first = pb.Chat(messages=chat.messages[:messages], tools=chat.tools, template_arguments=chat.template_arguments)
        with suppress(InvalidRequest):
            return self.render(first, False)
        first.messages.add(role="user", content="")  # some templates require a user message
        with suppress(InvalidRequest):
            return self.render(first, False)
        return ""

    def _written(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], more: dict[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **more)
        except Exception as error:  # a template may raise anything
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                "a message has half of a surrogate pair, which no text has; send whole characters", param="messages"
            ) from error
        return str(text)

    def grammar_state(
        self, request: pb.GenerateRequest, reasoning: ReasoningMarkers | None = None
    ) -> GrammarState | None:
        """Create the state of the grammar that limits the answer; None for free text.

        The grammar is the request's own, that of required tool calls, or that of optional calls with strict schemas.
        ``reasoning`` has the result of ``reasoning_markers``.
        """
        use, grammar = request.tool_use, request.grammar
        tools, given = _allowed_tools(request), request.HasField("grammar")
        if use.mode == pb.TOOL_MODE_REQUIRED:
            able = [tool for tool in tools if use.name in ("", tool.name)]
            if not able:
                wanted = f"the tool {use.name!r} is to be called" if use.name else "a tool is to be called"
                raise InvalidRequest(f"{wanted} and is not among the request's tools", param="tool_choice")
            if given:
                raise InvalidRequest(
                    "a tool must be called, so the answer cannot be kept to a grammar", param="grammar"
                )
            return self._required_calls(able, use.single or bool(use.name))
        if not given:
            return self._optional_calls(tools, use.single, reasoning) if _strict(request) else None
        steering = self._grammars.compile(grammar)
        if tools and use.mode != pb.TOOL_MODE_NONE:
            return self._required_calls(tools, use.single).union(steering)
        return steering

    def _required_calls(self, tools: list[pb.Tool], single: bool) -> GrammarState:
        special = self._grammars.special_token
        return self._compiled(tools, lambda: required_calls_grammar(self._dialect, tools, single, special))

    def _optional_calls(self, tools: list[pb.Tool], single: bool, reasoning: ReasoningMarkers | None) -> GrammarState:
        special, specials = self._grammars.special_token, self._grammars.special_tokens()
        return self._compiled(
            tools, lambda: optional_calls_grammar(self._dialect, tools, single, special, specials, reasoning)
        )

    def _compiled(self, tools: list[pb.Tool], lark: Callable[[], str]) -> GrammarState:
        try:
            return self._grammars.compile_lark(lark(), [parameters_schema(tool) for tool in tools])
        except RecursionError as error:
            raise InvalidRequest("the grammar of these tools is nested too deeply", param="tools") from error
        except InvalidRequest as error:
            raise type(error)(
                str(error).replace("the grammar", "the grammar of these tools", 1), param="tools"
            ) from error

    def parser(self, request: pb.GenerateRequest) -> ToolCallParser | None:
        """Create a parser of tool calls in the answer's text; None if the request allows no calls."""
        tools, use = _allowed_tools(request), request.tool_use
        if not tools or use.mode == pb.TOOL_MODE_NONE:
            return None
        functions = {tool.name: parameters_schema(tool) for tool in tools}
        either = request.HasField("grammar")
        single = use.single or bool(use.name)
        exact = either or use.mode == pb.TOOL_MODE_REQUIRED or _strict(request)
        return ToolCallParser(self._dialect, functions, single, exact, whole=either)

    def call_markers(self, request: pb.GenerateRequest, reasoning: ReasoningMarkers | None) -> CallMarkers | None:
        """Return the markers of calls in the answer's text; None if the request allows no calls."""
        return replace(CALLS[self._dialect], reasoning=reasoning) if self.parser(request) is not None else None

    def reasoning_markers(self, request: pb.GenerateRequest, prompt_end: str) -> ReasoningMarkers | None:
        """Return the markers of the answer's reasoning; None if the answer starts no reasoning.

        A grammar that the answer follows from its first token allows no reasoning, even if the prompt has opened it.
        """
        if request.HasField("grammar") or request.tool_use.mode == pb.TOOL_MODE_REQUIRED or not self._marks_reasoning:
            return None
        if opens_reasoning(prompt_end):
            return ReasoningMarkers("", END)
        fresh = request.prompt.chat.answer_start == pb.ANSWER_START_UNSPECIFIED
        return ReasoningMarkers(BEGIN, END) if fresh else None

    def shows_special(self, request: pb.GenerateRequest) -> bool:
        """True if special tokens must be in the answer's text, because they mark calls or reasoning."""
        reasons = self._reasons_by_special and request.prompt.HasField("chat")
        return reasons or (self._marked_by_special and self.parser(request) is not None)


def _allowed_tools(request: pb.GenerateRequest) -> list[pb.Tool]:
    """Return the tools that may be called. Raises InvalidRequest for an unknown name."""
    tools, allowed = list(request.prompt.chat.tools), set(request.tool_use.allowed)
    unknown = allowed.difference(tool.name for tool in tools)
    if unknown:
        raise InvalidRequest(
            f"the tool {min(unknown)[:80]!r} is allowed and is not among the request's tools", param="tool_choice"
        )
    return [tool for tool in tools if tool.name in allowed] if allowed else tools


def _strict(request: pb.GenerateRequest) -> bool:
    """True if calls are optional, but strict schemas or a list of allowed tools limit them by a grammar."""
    decides = request.tool_use.mode == pb.TOOL_MODE_UNSPECIFIED and not request.HasField("grammar")
    return decides and (bool(request.tool_use.allowed) or any(tool.strict for tool in request.prompt.chat.tools))
