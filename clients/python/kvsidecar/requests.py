"""Builds protocol requests from Python values.

Raises InvalidRequest, with the field's name, for values that a message cannot hold; the worker checks everything else.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from numbers import Real
from typing import Any, Unpack

from kvsidecar.errors import InvalidRequest
from kvsidecar.hint_options import HintOptions, check_number, check_text, hint_options
from kvsidecar.inference.v1 import inference_pb2 as pb

MAX_GRAMMAR_BYTES = 1 << 16
"""Maximum size of a grammar, schema or list of choices."""
REST_OF_CONTEXT = 2**32 - 1
"""``max_tokens`` of an answer that may fill the rest of the context."""

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
_TRUNCATION = {"left": pb.TRUNCATION_LEFT, "middle": pb.TRUNCATION_MIDDLE, "right": pb.TRUNCATION_RIGHT}
_SPECULATION = {
    "off": pb.SPECULATION_OFF,
    "ngram": pb.SPECULATION_NGRAM,
    "draft": pb.SPECULATION_DRAFT,
    "auto": pb.SPECULATION_AUTO,
}
_MODES = {
    "auto": pb.TOOL_MODE_UNSPECIFIED,
    "none": pb.TOOL_MODE_NONE,
    "required": pb.TOOL_MODE_REQUIRED,
}


def to_prompt(prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> pb.Prompt:
    """Convert text, token ids or chat messages to a Prompt.

    A message is ``{"role", "content"}``. A message of an assistant may have ``tool_calls``, and a message of a tool
    ``tool_call_id``. These fields and ``tools`` have OpenAI's form.
    """
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        return pb.Prompt(text=prompt)
    if len(prompt) and isinstance(prompt[0], Mapping):
        messages = [_message(m) for m in prompt]
        return pb.Prompt(chat=pb.Chat(messages=messages, tools=[_tool(tool) for tool in tools]))
    return pb.Prompt(token_ids=_token_ids("prompt", prompt))


def to_warm_request(
    prompt: Prompt,
    tools: Sequence[Mapping[str, Any]],
    tenant_salt: bytes,
    model: str = "",
    *,
    prefetch: bool = False,
    **hints: Unpack[HintOptions],
) -> pb.WarmRequest:
    """Build a WarmRequest: prompt, tenant, and the adapter if ``model`` names one."""
    check_text("model", model)
    _check_bytes("tenant_salt", tenant_salt)
    cache = hint_options(**hints)
    cache.tenant_salt = tenant_salt
    return pb.WarmRequest(prompt=to_prompt(prompt, tools), cache=cache, model=model, prefetch=prefetch)


class Options(HintOptions, total=False):
    """Options of ``to_request``, for the methods that pass them on."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_tokens: Sequence[int]
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    min_tokens: int
    ignore_eos: bool
    show_special_tokens: bool
    truncate_prompt_tokens: int | None
    truncate: str | None
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    skip_cache: bool
    tenant_salt: bytes
    exact_only: bool
    reuse_anywhere: bool | None
    document_separator: str | None
    segment_ends: Sequence[int]
    request_id: str
    json_schema: Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool
    speculation: str | None
    speculation_branches: int
    explain: bool
    model: str


def check_options(method: str, options: Iterable[str]) -> None:
    """Raise TypeError for an unknown option, as Python does for a method's own arguments."""
    for name in options:
        if name not in Options.__annotations__:
            close = difflib.get_close_matches(name, Options.__annotations__, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{hint}")


def to_request(
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    allowed_tokens: Sequence[int] = (),
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    include_stop: bool = False,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    show_special_tokens: bool = False,
    truncate_prompt_tokens: int | None = None,
    truncate: str | None = None,
    echo: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    skip_cache: bool = False,
    tenant_salt: bytes = b"",
    exact_only: bool = False,
    reuse_anywhere: bool | None = None,
    document_separator: str | None = None,
    segment_ends: Sequence[int] = (),
    request_id: str = "",
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    speculation: str | None = None,
    speculation_branches: int = 0,
    explain: bool = False,
    model: str = "",
    **hints: Unpack[HintOptions],
) -> pb.GenerateRequest:
    """Build a GenerateRequest; None leaves an option to the worker's default.

    At most one of ``json_schema``, ``regex``, ``choice`` and ``grammar`` constrains the answer. ``tool_choice`` is
    auto, none, required, or a tool's name. ``speculation`` is off, ngram, draft or auto; ``speculation_branches`` is
    the maximum number of branches of a draft tree (0: worker's setting). ``truncate`` is left or middle: the part of a
    prompt that is removed if the prompt is too long. ``model`` is the worker's model or one of its adapters.
    """
    for name, number in (
        ("max_tokens", max_tokens),
        ("min_tokens", min_tokens),
        ("top_k", top_k),
        ("truncate_prompt_tokens", truncate_prompt_tokens),
        ("speculation_branches", speculation_branches),
        ("logprobs", logprobs),
        ("prompt_logprobs", prompt_logprobs),
    ):
        check_number(name, number)
    check_number("seed", seed, bits=64)
    for name, value in (
        ("temperature", temperature),
        ("top_p", top_p),
        ("min_p", min_p),
        ("repetition_penalty", repetition_penalty),
        ("presence_penalty", presence_penalty),
        ("frequency_penalty", frequency_penalty),
    ):
        _check_real(name, value)
    for token, bias in (logit_bias or {}).items():
        check_number("a token of logit_bias", token)
        _check_real(f"logit_bias of token {token}", bias)
    for end in segment_ends:
        check_number("segment_ends", end)
    for token in stop_token_ids:
        check_number("stop_token_ids", token)
    check_text("document_separator", document_separator or "")
    check_text("request_id", request_id)
    check_text("model", model)
    _check_bytes("tenant_salt", tenant_salt)
    cache = hint_options(**hints)
    rest = pb.CacheOptions(
        skip_read=skip_cache,
        skip_write=skip_cache,
        tenant_salt=tenant_salt,
        exact_only=exact_only,
        reuse_anywhere=reuse_anywhere,
        document_separator=document_separator,
        segment_ends=segment_ends,
    )
    cache.MergeFrom(rest)
    return pb.GenerateRequest(
        prompt=to_prompt(prompt, tools),
        max_tokens=max_tokens,
        sampling=pb.Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias or {},
            allowed_tokens=_token_ids("allowed_tokens", allowed_tokens).ids,
            seed=seed,
        ),
        stop=_texts("stop", stop),
        stop_token_ids=stop_token_ids,
        include_stop=include_stop,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        show_special_tokens=show_special_tokens,
        truncate_prompt_tokens=truncate_prompt_tokens,
        truncation=truncation_of(truncate),
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        cache=cache,
        request_id=request_id,
        grammar=_grammar(json_schema, regex, choice, grammar),
        tool_use=_tool_use(tool_choice, parallel_tool_calls),
        speculation=speculation_of(speculation),
        speculation_branches=speculation_branches,
        explain=explain,
        model=model,
    )


def speculation_of(name: str | None) -> pb.Speculation.ValueType:
    """Return the protocol's value for the name of a proposer of draft tokens; None selects the worker's setting."""
    if name is not None and name not in _SPECULATION:
        raise InvalidRequest(f"speculation is {name!r}; allowed are {', '.join(_SPECULATION)}", param="speculation")
    return pb.SPECULATION_UNSPECIFIED if name is None else _SPECULATION[name]


def truncation_of(name: str | None) -> pb.Truncation.ValueType:
    """Return the protocol's value for the part of a prompt to truncate: ``left``, ``middle`` or ``right``.

    With None, a prompt is truncated on the left if ``truncate_prompt_tokens`` is set, otherwise not at all.
    """
    if name is not None and name not in _TRUNCATION:
        raise InvalidRequest(f"truncate is {name!r}; allowed are {', '.join(_TRUNCATION)}", param="truncate")
    return pb.TRUNCATION_UNSPECIFIED if name is None else _TRUNCATION[name]


def add_calls(calls: MutableSequence[pb.ToolCall], deltas: Iterable[pb.ToolCallDelta]) -> None:
    """Add deltas to the accumulated tool calls."""
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(pb.ToolCall(id=delta.id, name=delta.name))
        calls[delta.index].arguments += delta.arguments


def _grammar(
    schema: Mapping[str, Any] | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> pb.Grammar | None:
    given = [value for value in (schema, regex, choice, grammar) if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest("more than one of json_schema, regex, choice and grammar is set; leave the others out")
    if schema is not None:
        return pb.Grammar(json_schema=_json("json_schema", schema))
    if choice is not None:
        return pb.Grammar(choice=pb.Choices(texts=_texts("choice", choice)))
    if regex is not None:
        check_text("regex", regex)
        return pb.Grammar(regex=regex)
    check_text("grammar", grammar)
    return pb.Grammar(grammar=grammar or "")


def _tool_use(choice: str, parallel: bool) -> pb.ToolUse | None:
    if choice == "auto" and parallel:
        return None
    check_text("tool_choice", choice)
    name = "" if choice in _MODES else choice
    return pb.ToolUse(mode=_MODES.get(choice, pb.TOOL_MODE_REQUIRED), name=name, single=not parallel)


def _message(given: object) -> pb.ChatMessage:
    message = _mapping(given, "a message", "messages")
    if message.get("role") is None:
        raise InvalidRequest("a message has no role; system, user, assistant and tool are common", param="messages")
    return pb.ChatMessage(
        role=_text(message, "role"),
        content=_text(message, "content"),
        tool_calls=[_tool_call(call) for call in message.get("tool_calls") or ()],
        tool_call_id=_text(message, "tool_call_id"),
        name=_text(message, "name"),
    )


def _tool_call(given: object) -> pb.ToolCall:
    call = _mapping(given, "a call of tool_calls", "tool_calls")
    function = _mapping(call.get("function"), "function of tool_calls", "tool_calls")
    return pb.ToolCall(
        id=_text(call, "id", "tool_calls"),
        name=_text(function, "name", "tool_calls"),
        arguments=_text(function, "arguments", "tool_calls"),
    )


def _tool(given: object) -> pb.Tool:
    tool = _mapping(given, "a tool", "tools")
    function = _mapping(tool.get("function", tool), "function of tools", "tools")
    parameters = function.get("parameters")
    return pb.Tool(
        name=_text(function, "name", "tools"),
        description=_text(function, "description", "tools"),
        parameters=_json("tools", parameters) if parameters else "",
        strict=bool(function.get("strict")),
    )


def _mapping(value: object, name: str, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is of type {type(value).__name__}; a mapping is allowed", param=param)
    return value


def _text(holder: Mapping[str, Any], name: str, of: str = "") -> str:
    """Return a field's text; empty for None and for a field that is not there."""
    value = holder.get(name)
    if value is None:
        return ""
    check_text(f"{name} of {of}" if of else name, value)
    return str(value)


def _texts(name: str, texts: Sequence[str]) -> Sequence[str]:
    """Return the texts. One alone counts as a list of one, not as its characters."""
    found = [texts] if isinstance(texts, str) else texts
    for text in found:
        check_text(name, text)
    return found


def _token_ids(name: str, ids: Sequence[Any]) -> pb.TokenIds:
    try:
        return pb.TokenIds(ids=ids)
    except (TypeError, ValueError):
        for token in ids:
            check_number(f"a token of {name}", token)
        raise


def _check_real(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Real):
        raise InvalidRequest(f"{name} is {value!r}; a number is allowed", param=name)


def _check_bytes(name: str, value: object) -> None:
    if not isinstance(value, bytes):
        raise InvalidRequest(f"{name} is of type {type(value).__name__}; bytes are allowed", param=name)


def _json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", param=name) from error
    check_text(name, text)
    return text
