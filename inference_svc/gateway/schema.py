"""OpenAI requests, checked: what is supported, and the rest refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from kvsidecar.errors import InvalidRequest, UnsupportedOption
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_CHOICES = 8
# Answers of one request in all: prompts times choices.
MAX_ANSWERS = 512
_LARGEST = 2**31 - 1
# Part of OpenAI's API, but not of this server: refused unless they have the value that changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
# Meant for the service around the model; accepted and without effect there too.
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=0, le=_LARGEST)
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
                top_k=self.top_k,
                seed=seed,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
            ),
            cache=pb.CacheOptions(
                tenant_salt=self.cache_salt.encode(),
                document_separator=self.document_separator,
                segment_ends=self.segment_ends,
                exact_only=self.exact_only,
            ),
            request_id=request_id,
        )


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation; names and tool calls are not supported."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    def to_grpc(self) -> pb.ChatMessage:
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        return pb.ChatMessage(role="system" if self.role == "developer" else self.role, content=text)


class ChatRequest(_Common):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    def prompts(self) -> list[pb.Prompt]:
        return [pb.Prompt(chat=pb.Chat(messages=[m.to_grpc() for m in self.messages]))]

    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_grpc(self, prompt: pb.Prompt, choice: int, request_id: str) -> pb.GenerateRequest:
        request = super().to_grpc(prompt, choice, request_id)
        if self.max_completion_tokens is not None:
            request.max_tokens = self.max_completion_tokens
        return request


class CompletionRequest(_Common):
    """Body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    def prompts(self) -> list[pb.Prompt]:
        if isinstance(self.prompt, str):
            return [pb.Prompt(text=self.prompt)]
        if not self.prompt:
            raise InvalidRequest("prompt is empty; at least one token is needed")
        if isinstance(self.prompt[0], int):
            return [_ids(self.prompt)]
        return [pb.Prompt(text=p) if isinstance(p, str) else _ids(p) for p in self.prompt]

    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


def _ids(ids: Any) -> pb.Prompt:
    if any(not 0 <= i < 2**32 for i in ids):
        raise InvalidRequest("prompt has a token id outside 0 to 4294967295")
    return pb.Prompt(token_ids=pb.TokenIds(ids=ids))


def refuse_surrogates(body: dict[str, Any]) -> None:
    """Raises InvalidRequest for text in a body that is not Unicode: half of a surrogate pair, which JSON can write and
    UTF-8 cannot."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                name = where.encode("ascii", "backslashreplace").decode()
                raise InvalidRequest(
                    f"{name} has the lone surrogate U+{ord(value[error.start]):04X} at character {error.start}; send "
                    f"whole characters"
                ) from None
        elif isinstance(value, dict):
            names = [(f"{where}.{name}" if where else name, name, part) for name, part in value.items()]
            left += [(at, part) for at, name, part in names] + [(at, name) for at, name, _ in names]
        elif isinstance(value, list):
            left += [(f"{where}.{i}", part) for i, part in enumerate(value) if isinstance(part, str | dict | list)]


def parse(kind: type[_Common], body: Any) -> Any:
    """Checks a body. Raises UnsupportedOption, InvalidRequest; both name the field."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    refuse_surrogates(body)
    kept = {}
    for name, value in body.items():
        if name in _NEUTRAL and name not in kind.model_fields:
            if value not in _NEUTRAL[name]:
                raise UnsupportedOption(f"{name} is not supported by this server; leave it out")
        elif name not in _IGNORED and not (value is None and name in kind.model_fields):
            kept[name] = value  # null is the default
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors()[0]
        name, *inside = first["loc"] or ("the body",)
        # Alternatives of a union are named like their types.
        inside = [p for p in inside if not isinstance(p, str) or not (p == "str" or p.startswith("list["))]
        where = ".".join(map(str, (name, *inside)))
        if first["type"] == "extra_forbidden":
            raise UnsupportedOption(f"{where} is not an option of this server; leave it out") from error
        if first["type"] == "missing":
            raise InvalidRequest(f"{where} is missing") from error
        shown = repr(first["input"])
        raise InvalidRequest(f"{where} is {shown[:80]}: {first['msg'].lower()}") from error
