"""Errors about objects that may have one of several types name the field that is wrong."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from kvsidecar.errors import InvalidRequest

from inference_svc.gateway.anthropic_api.messages_request import MessagesRequest
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.unsupported_options import parse
from tests.inference_svc.gateway.conftest import Gateway

CALL = {"type": "function_call", "call_id": "c", "name": "f"}


def parsed(kind: Any, body: dict[str, Any]) -> Any:
    return parse(kind, json.dumps(body).encode(), body)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (CALL, "^input.1.arguments is missing$"),
        ({**CALL, "arguments": "{}", "foo": 1}, "^input.1.foo is not an option"),
        ({"type": "reasoning", "summary": 3}, "^input.1.summary is 3: input should be a valid list$"),
        ({"type": "wat"}, "^input.1.type is 'wat'; allowed are 'message', 'function_call', .*'item_reference'$"),
        ({"role": "user"}, "^input.1.content is missing$"),
        ({"role": "user", "content": [{"type": "wat"}]}, "^input.1.content.0 is of the type 'wat'"),
    ],
)
def test_items_of_a_response(item: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parsed(ResponsesRequest, {"model": "m", "input": [{"role": "user", "content": "q"}, item]})


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "tool_use", "id": "1", "name": "f"}, "^messages.0.content.0.input is missing$"),
        ({"type": "tool_result", "tool_use_id": "1", "foo": 1}, "^messages.0.content.0.foo is not an option"),
        ({"type": "text"}, "^messages.0.content.0.text is missing$"),
        ({"type": "wat"}, "^messages.0.content.0 is of the type 'wat'"),
        ({"type": "text", "text": "a", "cache_control": {"type": "x"}}, "cache_control.type is 'x': .*'ephemeral'$"),
    ],
)
def test_blocks_of_a_message(block: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parsed(MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]})


@pytest.mark.parametrize(
    "item",
    [
        {**CALL, "arguments": "{}", "async_": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "{}", "parsed": {"a": 1}}]},
    ],
)
def test_items_as_the_sdk_dumps_them_are_read(item: dict[str, Any]) -> None:
    assert parsed(ResponsesRequest, {"model": "m", "input": [{"role": "user", "content": "q"}, item]})


def test_options_that_would_be_ignored_are_refused(gateway: Gateway) -> None:
    made = gateway.post("/v1/responses", model="demo", input="one two", max_output_tokens=1)
    answer = httpx.get(f"{gateway.url}/v1/responses/{made['id']}", params={"stream": "true"}, timeout=60)
    assert answer.status_code == 400
    assert "does not replay the events" in answer.json()["error"]["message"]
    assert httpx.get(f"{gateway.url}/v1/responses/{made['id']}", params={"stream": "false"}).status_code == 200
    body = {"model": "demo", "messages": [{"role": "user", "content": "one"}], "max_tokens": 1, "top_logprobs": 2}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "top_logprobs needs logprobs: true"
    assert answer.json()["error"]["param"] == "top_logprobs"
