"""Calls behind reasoning, of a model whose calls have no marker: a stop string and a strict schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway, of_node
from tests.inference_svc.scripted_model import write_scripted_model

TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' }}{% if opened %}{{ '<think>' }}{% endif %}"
)
OPENING, END = '{"tool_calls": [{"name": "say", "arguments": {"q": "', '"}}]}'
ANSWER = ("<think>", "wh", "y", "</think>", "\n\n", OPENING, "a", " day", END, "<|end|>")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("models") / "thinker"
    write_scripted_model(folder, TEMPLATE, ("<think>", "</think>", OPENING, END), ("<|assistant|>", *ANSWER))
    with Node(str(folder), arena_bytes="64MiB", pool_bytes="64MiB") as node:
        gateway = of_node(node)
        yield gateway
        gateway.close()


def called(thinker: Gateway, opened: bool, function: dict[str, Any], **options: Any) -> Any:
    """Returns the arguments of the answer's call."""
    found = thinker.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hello there"}],
        tools=[{"type": "function", "function": {"name": "say", **function}}],
        chat_template_kwargs={"opened": opened},
        temperature=0,
        max_tokens=60,
        **options,
    )
    choice = found["choices"][0]
    assert (choice["finish_reason"], choice["message"]["reasoning"]) == ("tool_calls", "why")
    (call,) = choice["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("opened", [True, False])
def test_a_stop_string_does_not_end_a_call_behind_reasoning(thinker: Gateway, opened: bool) -> None:
    assert called(thinker, opened, {}, stop=[" day"]) == {"q": "a day"}


@pytest.mark.parametrize("opened", [True, False])
def test_a_call_behind_reasoning_keeps_to_its_strict_schema(thinker: Gateway, opened: bool) -> None:
    schema = {"type": "object", "properties": {"q": {"enum": ["b"]}}, "required": ["q"], "additionalProperties": False}
    assert called(thinker, opened, {"parameters": schema, "strict": True}, parallel_tool_calls=False) == {"q": "b"}
