"""Items of /v1/responses as chat messages: reasoning belongs to the assistant's turn that follows it."""

from __future__ import annotations

from typing import Any

import pytest

from inference_svc.gateway.responses_api.input_items import ITEM, to_messages

ASKED: dict[str, Any] = {"role": "user", "content": "a"}
SAID: dict[str, Any] = {"role": "assistant", "content": "b"}
SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
PATCH = {"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "x"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "dry"}
READ = {"role": "tool", "tool_call_id": "c1", "content": "dry"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def called(arguments: str = "{}", **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([ASKED, thought("t"), SAID], [ASKED, SAID | {"reasoning_content": "t"}]),
        ([ASKED, thought("t"), thought("u"), SAID], [ASKED, SAID | {"reasoning_content": "t\n\nu"}]),
        ([ASKED, thought("t"), SUMMARY, SAID], [ASKED, SAID | {"reasoning_content": "t"}]),
        ([ASKED, thought("t"), SEARCHED, SAID], [ASKED, SAID | {"reasoning_content": "t"}]),
        ([thought("t"), SEARCHED, thought("u"), SAID], [SAID | {"reasoning_content": "t\n\nu"}]),
        ([SAID, thought("t"), SEARCHED, SAID], [SAID, SAID | {"reasoning_content": "t"}]),
        ([SAID, thought("t"), thought("u"), SAID], [SAID, SAID | {"reasoning_content": "t\n\nu"}]),
        ([ASKED, thought("t"), CALL, RESULT], [ASKED, called(reasoning_content="t"), READ]),
        ([thought("t"), SEARCHED, PATCH], [called('{"input": "x"}', reasoning_content="t")]),
        ([SAID, thought("t"), CALL], [SAID, called(reasoning_content="t")]),
        ([thought("t"), SAID, CALL], [called(reasoning_content="t") | SAID]),
        ([thought("t"), CALL, RESULT, thought("u"), SAID],
         [called(reasoning_content="t"), READ, SAID | {"reasoning_content": "u"}]),
    ],
)  # fmt: skip
def test_reasoning_is_of_the_turn_that_follows(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    assert to_messages(map(ITEM.validate_python, items)) == messages


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([ASKED, SAID, thought("t")], [ASKED, SAID]),
        ([ASKED, SAID, thought("t"), SEARCHED], [ASKED, SAID]),
        ([ASKED, thought("t"), ASKED, SAID], [ASKED, ASKED, SAID]),
        ([CALL, thought("t"), RESULT, SAID], [called(), READ, SAID]),
    ],
)
def test_reasoning_without_a_turn_is_left_out(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """Nothing was said after it, so no message may have it."""
    assert to_messages(map(ITEM.validate_python, items)) == messages
