"""LiteLLM: chats, streams, a tool loop, responses, and its bridge from Anthropic's messages to OpenAI's protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frameworks.served_node import Server

litellm = pytest.importorskip("litellm", reason="LiteLLM is not here; make test-frameworks runs it")

SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Oslo?"}]
PROVIDERS = ["openai", "hosted_vllm"]


def of(server: Server, provider: str) -> dict[str, Any]:
    return {"model": f"{provider}/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_loop_and_its_stream(server: Server, provider: str) -> None:
    options = {**of(server, provider), "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 60}
    first = litellm.completion(messages=ASKED, tool_choice="required", parallel_tool_calls=False, **options)
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
    told = [*ASKED, first.choices[0].message.model_dump(), result]
    asked = {**options, "messages": told, "tool_choice": "none", "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**asked)
    parts = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    joined = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert joined == (whole.choices[0].message.content or "")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.asyncio
async def test_the_bridge_from_anthropics_messages(server: Server, provider: str) -> None:
    """``anthropic.messages`` of LiteLLM asks an OpenAI server: through responses or chats, as the version chooses."""
    options = {**of(server, provider), "max_tokens": 60, "tools": [TOOL]}
    first = await litellm.anthropic.messages.acreate(messages=ASKED, tool_choice={"type": "any"}, **options)
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    assert calls
    assert calls[0]["input"]["city"] in ("Oslo", "Rome")
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "dry"} for call in calls]
    told = [*ASKED, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    second = await litellm.anthropic.messages.acreate(messages=told, **options)
    assert second["role"] == "assistant"
    assert second["usage"]["output_tokens"] > 0
    stream = await litellm.anthropic.messages.acreate(messages=told, stream=True, **options)
    events = b"".join(
        [part if isinstance(part, bytes) else json.dumps(part).encode() for part in [p async for p in stream]]
    )
    assert b"message_start" in events
    assert b"message_stop" in events


def test_anthropics_provider(server: Server) -> None:
    options = {"model": "anthropic/claude-test", "api_base": server.url, "api_key": "none", "max_tokens": 60}
    tools = [{"type": "function", "function": FUNCTION}]
    answer = litellm.completion(messages=ASKED, tools=tools, tool_choice="required", **options)
    (call, *_) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_responses(server: Server) -> None:
    tool = {"type": "function", **FUNCTION}
    options = {**of(server, "openai"), "tools": [tool], "max_output_tokens": 60}
    first = litellm.responses(input=ASKED, tool_choice="required", include=["reasoning.encrypted_content"], **options)
    (call, *_) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    second = litellm.responses(input=[*ASKED, call.model_dump(), result], **options)
    assert second.usage.input_tokens > first.usage.input_tokens
