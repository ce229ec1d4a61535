"""Tools and items of /v1/responses that other servers have: accepted, and left out of the prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from openai.types.responses import FunctionToolParam

from inference_svc.gateway.request_runner import ChoiceChunk
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from tests.inference_svc.gateway.conftest import Gateway
from tests.inference_svc.gateway.test_responses_api import TOOL

OTHERS: dict[str, Any] = {
    "allowed_callers": ["direct"], "async": True, "defer_loading": True, "output_schema": {"type": "object"},
}  # fmt: skip


def counted(gateway: Gateway, **options: Any) -> int:
    found: Any = gateway.client.post("/responses/input_tokens", body={"model": "demo", **options}, cast_to=object)
    return int(found["input_tokens"])


def test_a_function_may_have_every_field_of_the_sdk(gateway: Gateway) -> None:
    assert set(TOOL) | set(OTHERS) == set(FunctionToolParam.__annotations__)
    search = [TOOL | OTHERS, {"type": "tool_search"}]
    assert counted(gateway, input="hi", tools=search) == counted(gateway, input="hi", tools=[TOOL])
    body = {"model": "demo", "input": "hi", "tools": search, "tool_choice": "none", "max_output_tokens": 2}
    answer: Any = gateway.client.post("/responses", body=body, cast_to=object)
    assert answer["tools"] == [TOOL | OTHERS, {"type": "tool_search"}]


@pytest.mark.parametrize(
    "hosted",
    [
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}, "status": "completed"},
        {"type": "shell_call_output", "call_id": "c", "output": []},
        {"type": "apply_patch_call", "call_id": "c", "status": "completed", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
        {"type": "mcp_approval_request", "id": "m", "arguments": "{}", "name": "f", "server_label": "s"},
        {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
    ],
)
def test_steps_of_tools_elsewhere_are_left_out(gateway: Gateway, hosted: dict[str, Any]) -> None:
    said = {"role": "user", "content": "and now?"}
    assert counted(gateway, input=[said, hosted, said]) == counted(gateway, input=[said, said])


def test_a_reference_needs_no_type(gateway: Gateway) -> None:
    client = gateway.client.responses
    first = client.create(model="demo", input="the sea is wide", max_output_tokens=4)
    (item,) = client.input_items.list(first.id).data
    typed, bare = [{"type": "item_reference", "id": item.id}], [{"id": item.id}]
    assert counted(gateway, input=bare) == counted(gateway, input=typed)


async def test_usage_tells_what_came_from_another_context() -> None:
    usage = pb.Usage(prompt_tokens=9, cached_tokens=4, approximate_tokens=3, cache_write_tokens=5)
    last = pb.GenerateStreamResponse(finish_reason=pb.FINISH_REASON_STOP, usage=usage)

    async def pieces() -> AsyncIterator[ChoiceChunk]:
        yield ChoiceChunk(0, last)

    writer = ResponseWriter(ResponsesRequest(input="hi"), "m", lambda stored: asyncio.sleep(0), [], [])
    answer = json.loads(await writer.whole(pieces()))
    details = {"cached_tokens": 4, "approximate_tokens": 3, "cache_write_tokens": 5}
    assert answer["usage"]["input_tokens_details"] == details


def test_a_count_is_the_usage_of_the_answer_to_the_same_salt(gateway: Gateway) -> None:
    """A worker remembers a call's own tokens for the caller's salt alone."""
    salted = {"model": "demo", "tools": [TOOL], "temperature": 1.5, "cache_salt": "mine", "store": False}
    said: list[Any] = [{"role": "user", "content": "how is the weather?"}]
    forced = {"tool_choice": {"type": "function", "name": "get_weather"}}
    for seed in range(4):
        first: Any = gateway.client.post(
            "/responses", body={**salted, **forced, "input": said, "seed": seed}, cast_to=object
        )
        (call,) = first["output"]
        said += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}]
    body = {**salted, "input": said, "max_output_tokens": 1}
    answer: Any = gateway.client.post("/responses", body=body, cast_to=object)
    assert counted(gateway, tools=[TOOL], cache_salt="mine", input=said) == answer["usage"]["input_tokens"]
