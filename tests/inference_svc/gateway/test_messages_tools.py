"""Tool calls over /v1/messages: deltas, results, and calls that are sent back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
from fastapi.responses import JSONResponse
from kvsidecar.inference.v1 import inference_pb2 as pb

from benchmarks.node import Node
from inference_svc.gateway.anthropic_api.message_writer import MessageWriter
from inference_svc.gateway.anthropic_api.messages_request import MessagesRequest
from inference_svc.gateway.request_runner import ChoiceChunk
from tests.inference_svc.gateway.conftest import Gateway
from tests.inference_svc.gateway.messages_client import (
    GREEDY,
    HELLO,
    NOTHING,
    TOOL,
    client_of,
    only_block,
    prompt_tokens,
    raw_events,
    said,
)


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with client_of(gateway) as found:
        yield found


@pytest.mark.parametrize("streamed", [False, True])
def test_a_function_is_called_and_its_result_read(client: anthropic.Anthropic, streamed: bool) -> None:
    options: Any = {"model": "demo", "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}
    talk = said("weather?")
    asked: Any = {
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 180,
        "messages": talk,
        **GREEDY,
        **options,
    }
    if streamed:
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            first: Any = stream.get_final_message()
        assert kinds.count("content_block_start") == 1
    else:
        first = client.messages.create(**asked)
    assert first.stop_reason == "tool_use"
    block = only_block(first)
    assert (block.type, block.name) == ("tool_use", "get_weather")
    assert block.input["city"] in ("Oslo", "Rome")
    talk += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "dry"}]},
    ]
    second = client.messages.create(max_tokens=3, messages=talk, tool_choice={"type": "none"}, **options)
    assert second.stop_reason in ("max_tokens", "end_turn")
    assert prompt_tokens(second.usage) > prompt_tokens(first.usage)


def test_a_server_of_many_tools_with_long_names(client: anthropic.Anthropic) -> None:
    """An MCP server's tools are called ``mcp__SERVER__TOOL``; Anthropic allows 128 characters, and any number."""
    tools: Any = [NOTHING | {"name": f"{'mcp__a_long_server_name__tool_':a<125}{i:03}"} for i in range(3)]
    choice: Any = {"type": "tool", "name": tools[1]["name"]}
    asked = client.messages.create(
        model="demo", max_tokens=400, messages=HELLO, tools=tools, tool_choice=choice, **GREEDY
    )
    assert only_block(asked).name == tools[1]["name"]
    many: Any = [NOTHING | {"name": f"tool_{i}"} for i in range(300)]
    few = client.messages.count_tokens(model="demo", messages=HELLO, tools=many[:200]).input_tokens
    assert client.messages.count_tokens(model="demo", messages=HELLO, tools=many).input_tokens > 1.4 * few


def test_arguments_that_are_empty_or_come_at_once_are_deltas(gateway: Gateway) -> None:
    body = {"model": "demo", "max_tokens": 90, "temperature": 0, "messages": HELLO, "tools": [NOTHING]}
    found = raw_events(gateway, body | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    start = next(data for kind, data in found if kind == "content_block_start")
    assert start["content_block"]["input"] == {}
    deltas = [data["delta"] for kind, data in found if kind == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {}
    assert found[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert len([kind for kind, _ in found if kind == "content_block_start"]) == 1


# Repetitions: the gateway routes by prompts of at least 256 bytes, and each worker keeps only the calls that it wrote.
BLOCK = 30


@pytest.mark.parametrize("protocol", ["messages", "chat", "responses"])
def test_a_call_that_is_sent_back_has_the_tokens_that_the_model_wrote(
    gateway: Gateway, two: Node, protocol: str
) -> None:
    """The model writes JSON with other spaces, and in other tokens, than the template would."""
    text = {"type": "string", "minLength": 20, "maxLength": 40}
    schema = {"type": "object", "properties": {"note": text}, "required": ["note"], "additionalProperties": False}
    first, second = {"messages": _messages, "chat": _chat, "responses": _responses}[protocol](gateway, two, schema)
    (prompt, _, answer), (_, cached, _) = first, second
    assert answer > 20
    assert cached >= prompt + answer - 2


Counted = tuple[int, int, int]
"""Prompt tokens, cached ones, and those of the answer."""


def _messages(gateway: Gateway, two: Node, schema: Any) -> tuple[Counted, Counted]:
    asked: Any = {"model": "demo", "max_tokens": 600, "tools": [{"name": "keep", "input_schema": schema}]}
    with client_of(gateway) as client:
        forced: Any = {"type": "tool", "name": "keep"}
        first: Any = client.messages.create(messages=said("Keep a note. " * BLOCK), tool_choice=forced, **asked)
        result = {"type": "tool_result", "tool_use_id": only_block(first).id, "content": "ok"}
        talk: Any = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        two.settle()  # the worker keeps an answer's tokens after it has sent the last one
        second: Any = client.messages.create(
            messages=[*said("Keep a note. " * BLOCK), *talk], **(asked | {"max_tokens": 1})
        )
    one, two = (
        (prompt_tokens(a.usage), a.usage.cache_read_input_tokens, a.usage.output_tokens) for a in (first, second)
    )
    return one, two


def _chat(gateway: Gateway, two: Node, schema: Any) -> tuple[Counted, Counted]:
    tool: Any = {"type": "function", "function": {"name": "keep", "parameters": schema}}
    asked: Any = {"model": "demo", "tools": [tool]}
    create = gateway.client.chat.completions.create
    first = create(messages=said("Keep one. " * BLOCK), tool_choice="required", parallel_tool_calls=False, **asked)
    message = first.choices[0].message
    answer: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}
    two.settle()
    second = create(messages=[*said("Keep one. " * BLOCK), message, answer], max_tokens=1, **asked)
    one, two = (
        (a.usage.prompt_tokens, a.usage.prompt_tokens_details.cached_tokens, a.usage.completion_tokens)
        for a in (first, second)
    )
    return one, two


def _responses(gateway: Gateway, two: Node, schema: Any) -> tuple[Counted, Counted]:
    tool: Any = {"type": "function", "name": "keep", "parameters": schema, "strict": True}
    asked: Any = {"model": "demo", "tools": [tool]}
    create = gateway.client.responses.create
    first = create(input="Keep this. " * BLOCK, tool_choice={"type": "function", "name": "keep"}, **asked)
    result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "ok"}
    two.settle()
    second = create(input=[*said("Keep this. " * BLOCK), *first.output, result], max_output_tokens=1, **asked)
    one, two = (
        (a.usage.input_tokens, a.usage.input_tokens_details.cached_tokens, a.usage.output_tokens)
        for a in (first, second)
    )
    return one, two


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", '"\\ud83d"', '{"\\ud83d": 1}', "[" * 5000, "1"])
async def test_arguments_that_no_answer_can_have_are_none(value: str) -> None:
    async def call() -> AsyncIterator[ChoiceChunk]:
        delta = pb.ToolCallDelta(index=0, id="a", name="say", arguments=f'{{"q": {value}}}')
        yield ChoiceChunk(0, pb.GenerateStreamResponse(tool_calls=[delta], finish_reason=pb.FINISH_REASON_TOOL_CALLS))

    asked = MessagesRequest.model_validate({"model": "demo", "max_tokens": 9, "messages": HELLO})
    answer = json.loads(bytes(JSONResponse(await MessageWriter(asked, "req_a").whole(call())).body))
    assert [block["input"] for block in answer["content"]] == [{"q": 1} if value == "1" else {}]
