"""OpenAI's requests, and what the worker is asked for."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import speculation_of
from pydantic import BaseModel, ConfigDict, Field

from inference_svc.gateway.messages import Message
from inference_svc.gateway.structured import ResponseFormat, StructuredOutputs, one_grammar
from inference_svc.gateway.tools import NamedTool, Tool, tool_use

MAX_CHOICES = 8
# Answers of one request in all: prompts times choices.
MAX_ANSWERS = 512
_LARGEST = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class Common(BaseModel):
    """What chats and completions have alike."""

    model_config = ConfigDict(extra="forbid", strict=False)

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1, le=_LARGEST)
    """vLLM's, like the next three; -1, as 0, for all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: list[TokenId] | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool = False
    cache_salt: str = ""
    """Separates tenants: requests with different salts never share cached text."""
    document_separator: str | None = Field(default=None, max_length=64)
    """Text before which the prompt's documents begin; each is found again wherever it stands."""
    segment_ends: list[Annotated[int, Field(ge=1, le=_LARGEST)]] = Field(default_factory=list)
    """Where documents end in a prompt of token ids."""
    exact_only: bool = False
    """Reuse nothing that was read in another context."""
    speculation: Literal["off", "ngram", "draft", "auto"] | None = None
    """Who guesses tokens that the model then verifies; answers stay the same. As the worker is set to when left out."""
    skip_cache: bool = False
    """Reuse nothing and store nothing."""
    explain: bool = False
    """Say which parts of the prompt had been read before."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's, like the older names behind it."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @cached_property
    def grammar(self) -> tuple[str, pb.Grammar | None]:
        """What the answer must be, and the option that says so. Raises InvalidRequest when several do."""
        return one_grammar(
            self.response_format,
            self.structured_outputs,
            {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")},
            self.guided_whitespace_pattern,
        )

    @property
    def choices(self) -> int:
        return self.n or 1

    def top_logprobs_wanted(self) -> int | None:
        raise NotImplementedError

    def to_grpc(self, prompt: pb.Prompt, choice: int, request_id: str) -> pb.GenerateRequest:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = None if self.seed is None else (self.seed + choice) % 2**64
        return pb.GenerateRequest(
            prompt=prompt,
            max_tokens=self.max_tokens,
            stop=stops,
            ignore_eos=self.ignore_eos,
            logprobs=self.top_logprobs_wanted(),
            sampling=pb.Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=None if self.top_k is None else max(0, self.top_k),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias or {},
                allowed_tokens=self.allowed_token_ids or (),
                seed=seed,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
            ),
            cache=pb.CacheOptions(
                skip_read=self.skip_cache,
                skip_write=self.skip_cache,
                tenant_salt=self.cache_salt.encode(),
                document_separator=self.document_separator,
                segment_ends=self.segment_ends,
                exact_only=self.exact_only,
            ),
            request_id=request_id,
            grammar=self.grammar[1],
            speculation=speculation_of(self.speculation),
            explain=self.explain,
        )


class ChatRequest(Common):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def prompts(self) -> list[pb.Prompt]:
        messages = [m.to_grpc(i) for i, m in enumerate(self.messages)]
        return [pb.Prompt(chat=pb.Chat(messages=messages, tools=[tool.to_grpc() for tool in self.tools or ()]))]

    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_grpc(self, prompt: pb.Prompt, choice: int, request_id: str) -> pb.GenerateRequest:
        request = super().to_grpc(prompt, choice, request_id)
        if self.max_completion_tokens is not None:
            request.max_tokens = self.max_completion_tokens
        use = tool_use(self.tool_choice, self.parallel_tool_calls, bool(self.tools))
        if use is not None:
            request.tool_use.CopyFrom(use)
        return request


class CompletionRequest(Common):
    """Body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    def prompts(self) -> list[pb.Prompt]:
        if isinstance(self.prompt, str):
            return [pb.Prompt(text=self.prompt)]
        if not self.prompt:
            raise InvalidRequest("prompt is empty; at least one token is needed", param="prompt")
        if isinstance(self.prompt[0], int):
            return [_ids(self.prompt)]
        return [pb.Prompt(text=p) if isinstance(p, str) else _ids(p) for p in self.prompt]

    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


def _ids(ids: Any) -> pb.Prompt:
    if any(not 0 <= i < 2**32 for i in ids):
        raise InvalidRequest("prompt has a token id outside 0 to 4294967295", param="prompt")
    return pb.Prompt(token_ids=pb.TokenIds(ids=ids))
