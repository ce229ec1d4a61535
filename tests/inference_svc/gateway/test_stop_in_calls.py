"""A stop string ends an answer's text, and never a tool call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway, of_node
from tests.inference_svc.models.test_real_models import smollm2  # noqa: F401

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
SAY = {"name": "say", "description": "Say a text", "parameters": SCHEMA}


def said(number: int, text: str) -> list[dict[str, Any]]:
    """A call of an earlier answer, and its result."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": "say", "arguments": json.dumps({"q": text})}}
    result = {"role": "tool", "tool_call_id": f"c{number}", "content": "ok"}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, result]


MESSAGES = [
    {"role": "user", "content": "say: hello"},
    *said(0, "hello"),
    *said(1, "good day"),
    {"role": "user", "content": "say: Observation: it rains"},
]


@pytest.fixture(scope="module")
def real(smollm2: str) -> Iterator[Gateway]:  # noqa: F811
    with Node("smollm2", arena_bytes="64MiB") as node:
        gateway = of_node(node)
        yield gateway
        gateway.close()


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_is_whole_whatever_stops_the_text(real: Gateway, strict: bool) -> None:
    tools = [{"type": "function", "function": {**SAY, "strict": strict}}]
    options: dict[str, Any] = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 50}
    want = real.post("/v1/chat/completions", tools=tools, **options)["choices"][0]
    arguments = want["message"]["tool_calls"][0]["function"]["arguments"]
    assert " day" in arguments, "the stop string below is in it"
    got = real.post("/v1/chat/completions", tools=tools, stop=[" day", "}"], **options)["choices"][0]
    assert got["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    assert got["finish_reason"] == "tool_calls"


def test_messages_have_whole_arguments(real: Gateway) -> None:
    tools = [{"name": "say", "description": "Say a text", "input_schema": SCHEMA}]
    blocks: list[dict[str, Any]] = [{"role": "user", "content": "say: hello"}]
    for number, text in enumerate(("hello", "good day")):
        call = {"type": "tool_use", "id": f"c{number}", "name": "say", "input": {"q": text}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": "ok"}
        blocks += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    blocks += [{"role": "user", "content": "say: Observation: it rains"}]
    options: dict[str, Any] = {"model": "smollm2", "messages": blocks, "temperature": 0, "max_tokens": 50}
    found = real.post("/v1/messages", tools=tools, stop_sequences=["}"], **options)
    call = next(block for block in found["content"] if block["type"] == "tool_use")
    assert set(call["input"]) == {"q"}
    assert found["stop_reason"] == "tool_use"
