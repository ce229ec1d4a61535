"""Schemas of ``/v1/chat/completions`` and ``/v1/completions``, and their worker requests."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.request_limits import check_num_stops
from kvsidecar.requests import REST_OF_CONTEXT, speculation_of, truncation_of
from pydantic import BeforeValidator, Field

from inference_svc.gateway.body_model import FIRST_ERROR, BodyModel
from inference_svc.gateway.cache_hints import CacheFields
from inference_svc.gateway.chat_messages import Messages, answer_start
from inference_svc.gateway.openai_tools import (
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
    to_chat,
    tool_use,
)
from inference_svc.gateway.prompt_cache_options import add_retention, routing_key
from inference_svc.gateway.response_format import ResponseFormat, StructuredOutputs, one_grammar

MAX_CHOICES = 8
# Maximum number of answers to one request, which is the number of prompts times ``n``.
MAX_ANSWERS = 512
MAX_LOGPROBS = 20
MAX_BIASED = 1024
_MAX_EFFORT_CHARS = 32
_LARGEST = 2**31 - 1
_Ints = Annotated[list[int], FIRST_ERROR]
DEFAULT_LENGTH = "Without a value: what the context still holds, or what the gateway's --default-max-tokens says."
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], FIRST_ERROR]


def _few(biased: Any) -> Any:
    """Check only the number of tokens in ``logit_bias``. Raises InvalidRequest."""
    if isinstance(biased, dict) and len(biased) > MAX_BIASED:
        raise InvalidRequest(
            f"logit_bias has {len(biased)} tokens; at most {MAX_BIASED} are allowed", param="logit_bias"
        )
    return biased


_FEW = BeforeValidator(_few)


class StreamOptions(BodyModel):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's option: with ``include_usage``, every event has the usage so far."""


class GenerationOptions(CacheFields):
    """Generation options that chats and completions share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1, le=_LARGEST)
    """vLLM's option, as are the next three. -1 and 0 allow all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    logit_bias: Annotated[dict[TokenId, float], _FEW] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | Annotated[list[str], FIRST_ERROR] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    """vLLM's option, as are the next six. These tokens end an answer as an end-of-sequence token does."""
    min_tokens: int | None = Field(default=None, ge=0, le=_LARGEST)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=_LARGEST)
    """Maximum number of prompt tokens to keep; -1 means as many as fit into the context."""
    truncation_side: Literal["left", "right"] | None = None
    """Side of the prompt at which truncate_prompt_tokens removes tokens."""
    truncate: Literal["left", "middle", "right"] | None = None
    """Part of a too long prompt that loses tokens. Without truncate_prompt_tokens, the context is the limit."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    logprob_token_ids: TokenIds | None = None
    """vLLM's option: ``logprobs`` reports these tokens at each position, instead of the likeliest ones."""
    return_token_ids: bool = False
    """vLLM's option, as is the next one. Return the token ids of prompt and answer."""
    return_tokens_as_token_ids: bool = False
    """Write the tokens in ``logprobs`` as ``token_id:ID`` instead of as text."""
    prompt_cache_key: Any = None
    """The gateway prefers to route requests with the same key to the same worker and node."""
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    document_separator: str | None = Field(default=None, max_length=64)
    """Text before each document of the prompt; the worker may reuse a document's chunks at another position."""
    segment_ends: Annotated[list[Annotated[int, Field(ge=1, le=_LARGEST)]], FIRST_ERROR] = Field(default_factory=list)
    """End positions of the documents in a prompt of token ids."""
    exact_only: bool = False
    """Reuse no chunks that were computed behind another prefix."""
    reuse_anywhere: bool | None = None
    """Reuse chunks that were computed behind another prefix, if the model has passed `kvsidecar verify`; this may
    change the answer. Default: the worker's setting."""
    speculation: Literal["off", "ngram", "draft", "auto"] | None = None
    """Proposer of draft tokens, which the model verifies; answers stay the same. Default: the worker's setting."""
    speculation_branches: int = Field(default=0, ge=0, le=_LARGEST)
    """Maximum number of branches in a draft tree; 0 means the worker's setting, which is also the upper limit."""
    skip_cache: bool = False
    """Reuse no cached tokens for this request, and store none of its chunks."""
    explain: bool = False
    """Report which parts of the prompt were cached, and the miss reason."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's option; the ``guided_*`` options below are its older names."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], FIRST_ERROR] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @cached_property
    def grammar(self) -> tuple[str, pb.Grammar | None]:
        """Name of the option that constrains the answer, and its grammar.

        Raises InvalidRequest if the request sets several such options.
        """
        return one_grammar(
            self.response_format,
            self.structured_outputs,
            {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")},
            self.guided_whitespace_pattern,
        )

    @property
    def has_continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def num_top_logprobs(self) -> int | None:
        raise NotImplementedError

    def truncation_limit(self) -> int | None:
        """Return the maximum number of prompt tokens to keep. Raises InvalidRequest.

        0 means as many as fit into the context; None means all.
        """
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0; allowed are 1 and more, and -1 for as many as there is room for",
                param="truncate_prompt_tokens",
            )
        return None if self.truncate_prompt_tokens is None else max(0, self.truncate_prompt_tokens)

    def cache_options(self) -> pb.CacheOptions:
        options = super().cache_options()
        options.MergeFrom(
            pb.CacheOptions(
                skip_read=self.skip_cache,
                skip_write=self.skip_cache,
                document_separator=self.document_separator,
                segment_ends=self.segment_ends,
                exact_only=self.exact_only,
                prompt_cache_key=routing_key(self.prompt_cache_key),
                reuse_anywhere=self.reuse_anywhere,
            )
        )
        add_retention(options, self.prompt_cache_options, self.prompt_cache_retention, self.marked_messages())
        return options

    def marked_messages(self) -> list[tuple[int, int | None]]:
        """Return the messages before each breakpoint, and its retention (seconds; None for OpenAI's breakpoints)."""
        return []

    def to_grpc(self, prompt: pb.Prompt, request_id: str) -> pb.GenerateRequest:
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs is not for streams; leave stream out, or take echo with logprobs of completions",
                param="prompt_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is for streams; set stream to true, or leave it out", param="stream_options"
            )
        most = self.truncation_limit()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        check_num_stops(len(stops))
        return pb.GenerateRequest(
            prompt=prompt,
            max_tokens=self.max_tokens,
            stop=stops,
            stop_token_ids=self.stop_token_ids or (),
            min_tokens=self.min_tokens or 0,
            ignore_eos=self.ignore_eos,
            include_stop=self.include_stop_str_in_output,
            show_special_tokens=not self.skip_special_tokens,
            truncate_prompt_tokens=most,
            truncation=truncation_of(self.truncate or (None if most is None else self.truncation_side)),
            prompt_logprobs=self.prompt_logprobs,
            logprobs=self.num_top_logprobs(),
            logprob_tokens=self.logprob_token_ids or (),
            sampling=pb.Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=None if self.top_k is None else max(0, self.top_k),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias or {},
                allowed_tokens=self.allowed_token_ids or (),
                seed=None if self.seed is None else self.seed % 2**64,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
            ),
            cache=self.cache_options(),
            request_id=request_id,
            grammar=self.grammar[1],
            speculation=speculation_of(self.speculation),
            speculation_branches=self.speculation_branches,
            explain=self.explain,
            return_prompt_tokens=self.return_token_ids,
            continuous_usage=self.has_continuous_usage,
        )


class KvTransferParams(BodyModel):
    """``kv_transfer_params`` of a router that has already tokenized the chat."""

    prompt_token_ids: _Ints
    """Token ids of the prompt; the worker computes them instead of the rendered messages."""


class ChatRequest(GenerationOptions):
    """Body of ``/v1/chat/completions``."""

    messages: Messages = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=_LARGEST, description=DEFAULT_LENGTH)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=_LARGEST, description=f"Counts instead of max_tokens. {DEFAULT_LENGTH}"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], FIRST_ERROR] | None = None
    """Tools in OpenAI's oldest format, as is the next option. The answer then has ``function_call``."""
    function_call: Literal["auto", "none"] | FunctionName | None = None
    reasoning_effort: Any = None
    """Argument of the chat template; ``none`` also switches the template's ``enable_thinking`` off."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's option, as are the next two. Additional arguments of the chat template, such as ``enable_thinking``."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kv_transfer_params: KvTransferParams | None = None
    echo: bool = False
    """vLLM's option: the answer begins with the assistant's message that it continues."""
    add_special_tokens: bool = False
    """vLLM's option: True puts the beginning-of-sequence token before the rendered chat."""

    def prompts(self) -> list[pb.Prompt]:
        if self.kv_transfer_params is not None:
            return [self._forwarded_prompt(self.kv_transfer_params.prompt_token_ids)]
        start = answer_start(self.add_generation_prompt, self.continue_final_message)
        chat = to_chat(self.messages, self._tools(), self._template_arguments(), start)
        return [pb.Prompt(chat=chat, with_special_tokens=self.add_special_tokens)]

    @property
    def echoed(self) -> str:
        """With ``echo``, the text of the assistant's message that the answer continues; otherwise empty."""
        return self.messages[-1].text if self.echo and self.messages[-1].role == "assistant" else ""

    def marked_messages(self) -> list[tuple[int, int | None]]:
        return [
            (i + 1, seconds)
            for i, message in enumerate(self.messages)
            for part in (message.content if isinstance(message.content, list) else ())
            for seconds in part.breakpoints()
        ]

    def _forwarded_prompt(self, ids: list[int]) -> pb.Prompt:
        """Return the prompt of the token ids that a router sent. Raises InvalidRequest."""
        if not ids:
            raise InvalidRequest(
                "kv_transfer_params.prompt_token_ids is empty; at least one token is needed", param="kv_transfer_params"
            )
        if self._tools():
            raise InvalidRequest(
                "kv_transfer_params.prompt_token_ids cannot stand beside tools: calls are found by the rendered chat",
                param="kv_transfer_params",
            )
        return _ids(ids)

    def _template_arguments(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        if not isinstance(effort, str):
            return self.chat_template_kwargs or {}
        thinking = {"enable_thinking": False} if effort == "none" else {}
        return {"reasoning_effort": effort[:_MAX_EFFORT_CHARS], **thinking, **(self.chat_template_kwargs or {})}

    def _tools(self) -> list[Tool]:
        """Return the tools from ``tools`` or ``functions``. Raises InvalidRequest if both are set."""
        if self.functions and self.tools:
            raise InvalidRequest("functions and tools are both set; tools can hold all of them", param="functions")
        return self.tools or [Tool(type="function", function=function) for function in self.functions or ()]

    def _tool_use(self) -> pb.ToolUse | None:
        if not self.functions:
            return tool_use(self.tool_choice, self.parallel_tool_calls, bool(self.tools))
        choice = self.function_call
        named = NamedTool(type="function", function=choice) if isinstance(choice, FunctionName) else choice
        return tool_use(named, False, True)

    def num_top_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_grpc(self, prompt: pb.Prompt, request_id: str) -> pb.GenerateRequest:
        request = super().to_grpc(prompt, request_id)
        if self.max_completion_tokens is not None:
            request.max_tokens = self.max_completion_tokens
        elif self.max_tokens is None:
            request.max_tokens = REST_OF_CONTEXT
        use = self._tool_use()
        if use is not None:
            request.tool_use.CopyFrom(use)
        if request.tool_use.mode == pb.TOOL_MODE_REQUIRED and self.grammar[0] == "response_format":
            request.ClearField("grammar")  # the grammar is for text, and a required call has none
        return request


class CompletionRequest(GenerationOptions):
    """Body of ``/v1/completions``."""

    prompt: str | _Ints | Annotated[list[str], FIRST_ERROR] | Annotated[list[_Ints], FIRST_ERROR]
    max_tokens: int | None = Field(default=None, ge=0, le=_LARGEST, description="Without a value: 256.")
    """With ``echo``, 0 returns only the prompt."""
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Number of alternatives at each position; OpenAI itself allows at most 5."""
    add_special_tokens: bool = True
    """vLLM's option: False tokenizes text without the beginning-of-sequence token."""

    def prompts(self) -> list[pb.Prompt]:
        if isinstance(self.prompt, str):
            return [self._text(self.prompt)]
        if not self.prompt:
            raise InvalidRequest("prompt is empty; at least one token is needed", param="prompt")
        if isinstance(self.prompt[0], int):
            return [_ids(self.prompt)]
        if len(self.prompt) * self.num_choices > MAX_ANSWERS:  # checked first: each is many times its text
            raise InvalidRequest(
                f"prompt has {len(self.prompt)} prompts with n = {self.num_choices} answers each; "
                f"at most {MAX_ANSWERS} answers are allowed"
            )
        return [self._text(p) if isinstance(p, str) else _ids(p) for p in self.prompt]

    def _text(self, text: str) -> pb.Prompt:
        return pb.Prompt(text=text, without_special_tokens=not self.add_special_tokens)

    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def is_prompt_only(self) -> bool:
        """True if the answer contains only the prompt. Raises InvalidRequest for ``max_tokens`` 0 without ``echo``."""
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens is 0; at least 1 is needed without echo", param="max_tokens")
        return self.max_tokens == 0

    def to_grpc(self, prompt: pb.Prompt, request_id: str) -> pb.GenerateRequest:
        request = super().to_grpc(prompt, request_id)
        request.echo = self.echo
        if self.echo and self.logprobs is not None:
            request.prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        if self.is_prompt_only:  # a worker always generates a token; the answer omits it
            request.max_tokens = 1
        return request


def _ids(ids: Any) -> pb.Prompt:
    if any(not 0 <= i < 2**32 for i in ids):
        raise InvalidRequest("prompt has a token id outside 0 to 4294967295", param="prompt")
    return pb.Prompt(token_ids=pb.TokenIds(ids=ids))
