"""Tools, with the official client. The built-in model's template knows none: they are described to it.

It answers with JSON then.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway

MESSAGES: list[Any] = [{"role": "user", "content": "how is the weather in Oslo"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Tells it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
]


NOBODY = {"type": "function", "function": {"name": "nobody"}}


class GetWeather(pydantic.BaseModel):
    """Tells the weather."""

    model_config = pydantic.ConfigDict(extra="forbid")
    dry: bool


def arguments_are_right(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_time":
        return bool(arguments == {})
    return arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_call_that_is_demanded_is_valid_whatever_the_model(gateway: Gateway, temperature: float) -> None:
    answer = gateway.client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        temperature=temperature, max_tokens=120,
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.id.startswith("call_")
    assert arguments_are_right(call)


def test_several_calls_are_as_valid(gateway: Gateway) -> None:
    answer = gateway.client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=TOOLS, tool_choice="required", temperature=1, seed=3, max_tokens=900
    )
    calls = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert all(arguments_are_right(call) for call in calls)
    assert len({call.id for call in calls}) == len(calls) >= 1


def test_one_that_is_named_is_called_and_streamed_as_the_sdk_wants_it(gateway: Gateway) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    options: Any = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "tool_choice": named, "temperature": 0}
    whole = gateway.client.chat.completions.create(max_tokens=90, **options).choices[0]
    parts = [p.choices[0] for p in gateway.client.chat.completions.create(stream=True, max_tokens=90, **options)]
    pieces = [piece for part in parts for piece in part.delta.tool_calls or []]
    assert pieces[0].id
    assert pieces[0].function.name == "get_weather"
    assert {piece.index for piece in pieces} == {0}
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert len(pieces) > 2, "arguments come as they are written"
    (call,) = whole.message.tool_calls or []
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    assert parts[-1].finish_reason == whole.finish_reason == "tool_calls"
    assert not any(part.delta.content for part in parts)
    with gateway.client.chat.completions.stream(max_tokens=90, **options) as stream:
        final = stream.get_final_completion().choices[0].message
    assert (final.tool_calls or [])[0].function.arguments == call.function.arguments


def test_the_sdks_own_types_come_back_parsed(gateway: Gateway) -> None:
    answer = gateway.client.chat.completions.parse(
        model="demo", messages=MESSAGES, tools=[openai.pydantic_function_tool(GetWeather)], tool_choice="required",
        parallel_tool_calls=False, max_tokens=90,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    result = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
    again = gateway.client.chat.completions.create(
        model="demo", messages=[*MESSAGES, answer.choices[0].message, result], max_tokens=2
    )
    assert again.usage is not None


@pytest.mark.parametrize("streamed", [False, True])
def test_what_it_answered_is_accepted_as_a_message(gateway: Gateway, streamed: bool) -> None:
    """Also an answer without any call, and beside a result of several parts."""
    options: Any = {"model": "demo", "tools": TOOLS, "temperature": 0}
    first = gateway.client.chat.completions.create(
        messages=MESSAGES, tool_choice="required", parallel_tool_calls=False, max_tokens=90, **options
    )
    options["max_tokens"] = 3
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    history: list[Any] = [*MESSAGES, message.model_dump() if streamed else message, result]
    second = gateway.client.chat.completions.create(messages=history, tool_choice="none", **options)
    assert second.choices[0].message.tool_calls is None
    third = gateway.client.chat.completions.create(messages=[*history, second.choices[0].message, *MESSAGES], **options)
    assert third.usage.prompt_tokens > second.usage.prompt_tokens > first.usage.prompt_tokens


def test_tools_do_not_keep_an_answer_from_being_text_or_from_its_schema(gateway: Gateway) -> None:
    """With both, it is a call or what the schema says: nothing else."""
    plain = gateway.client.chat.completions.create(model="demo", messages=MESSAGES, tools=TOOLS, max_tokens=5)
    assert plain.choices[0].finish_reason in ("stop", "length")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    for seed in range(4):
        choice = gateway.client.chat.completions.create(
            model="demo", messages=MESSAGES, tools=TOOLS, response_format=wanted, seed=seed, temperature=1.5,
            max_tokens=200, parallel_tool_calls=False,
        ).choices[0]  # fmt: skip
        if choice.message.tool_calls:
            assert all(arguments_are_right(call) for call in choice.message.tool_calls)
        else:
            assert json.loads(choice.message.content or "") in ("a", "b")


def test_a_form_of_the_text_does_not_keep_a_call_from_being_made(gateway: Gateway) -> None:
    """instructor sends both with what it asks of ``/v1/responses``."""
    schema = {"name": "x", "schema": {"enum": ["a", "b"]}}
    answer = gateway.client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=120, temperature=0,
        response_format={"type": "json_schema", "json_schema": schema}, parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert arguments_are_right(call)


def test_strict_functions_are_kept_to_where_the_model_decides(gateway: Gateway) -> None:
    """The built-in model's calls stand alone: what begins as one goes on as one, and all else is free."""
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    options: Any = {"model": "demo", "messages": MESSAGES, "tools": strict, "max_tokens": 150, "temperature": 1.5}
    for seed in range(3):
        choice = gateway.client.chat.completions.create(seed=seed, **options).choices[0]
        assert all(arguments_are_right(call) for call in choice.message.tool_calls or [])
    bad = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]
    with pytest.raises(openai.BadRequestError, match="'not'") as caught:
        gateway.client.chat.completions.create(**{**options, "tools": bad})
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("option", "param", "said"),
    [
        ({"tools": TOOLS, "tool_choice": NOBODY}, "tool_choice", "nobody"),
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "perhaps"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "a b"),
        ({"tools": [{"type": "function", "function": {"name": "f" * 129}}]}, "tools", "1 to 128 of them"),
        ({"tools": [TOOLS[1]] * 1025}, "tools", "1025 tools; at most 1024"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "two tools are called 'get_time'"),
        ({"tools": [{"type": "search"}]}, "tools.0.type", "search"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}],
          "tool_choice": "required"}, "tools", "'not'"),
        ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "guided_regex", "grammar"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f",
          "arguments": "{}"}}]}]}, "messages", "only an assistant calls"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_named(gateway: Gateway, option: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, **option})
    assert said in caught.value.message
    assert caught.value.param == param


def test_grpc_has_it_too(two: Node) -> None:
    client = two.client(0)
    options: Any = {"tools": TOOLS, "tool_choice": "get_weather", "max_tokens": 120, "temperature": 0}
    whole = client.generate(MESSAGES, **options)
    assert (whole.text, whole.finish_reason) == ("", "tool_calls")
    (call,) = whole.tool_calls
    chunks = list(client.stream(MESSAGES, **options))
    final = chunks[-1].final
    assert final is not None
    assert [(c.name, c.arguments) for c in final.tool_calls] == [(call.name, call.arguments)]
    assert sum(len(chunk.tool_calls) for chunk in chunks) > 2
    warm = client.warm([*MESSAGES], tools=TOOLS)
    assert warm.prompt_tokens > client.warm([*MESSAGES]).prompt_tokens
