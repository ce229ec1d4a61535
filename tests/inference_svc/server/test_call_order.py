"""Text between and after calls: at its place in the answer, for any number of tokens in a message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import to_request

from inference_svc.gateway.anthropic_api.message_writer import MessageWriter
from inference_svc.gateway.anthropic_api.messages_request import MessagesRequest
from inference_svc.gateway.request_runner import ChoiceChunk
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.server.inference_service import InferenceService
from inference_svc.server.runtime import Runtime, build_runtime
from inference_svc.server.worker_config import WorkerConfig
from tests.inference_svc.scripted_model import write_scripted_model

TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' }}{# <think></think><tool_call></tool_call> #}"
)
FIRST, END, LAST = '<tool_call>{"name": "say", "arguments": {"q": "', '"}}', '"}}</tool_call> So be it.'
SECOND = '</tool_call> I say<tool_call>{"name": "say", "arguments": {"q": "b'
ANSWER = ("<think>", "wh", "y", "</think>", "\n\n", "Well. ", FIRST, "a", " day", END, SECOND, LAST, "<|end|>")
ADDED = ("<think>", "</think>", "Well. ", FIRST, END, SECOND, LAST)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("caller")
    write_scripted_model(folder / "model", TEMPLATE, ADDED, ("<|assistant|>", *ANSWER))
    config = WorkerConfig(model=str(folder / "model"), socket=folder / "w.sock", cache_socket=None, pool_bytes=32 << 20)
    found = build_runtime(config)
    yield found
    found.close()


async def answered(runtime: Runtime, interval: int) -> list[pb.GenerateStreamResponse]:
    config = runtime.config.model_copy(update={"stream_interval": interval})
    tools = [{"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}]
    request = to_request([{"role": "user", "content": "hi"}], tools=tools, max_tokens=60, temperature=0, logprobs=0)
    request.continuous_usage = True
    service = InferenceService(replace(runtime, config=config))
    return [part async for part in service._generate(request)]


async def chunks(parts: list[pb.GenerateStreamResponse]) -> AsyncIterator[ChoiceChunk]:
    for part in parts:
        yield ChoiceChunk(0, part)


@pytest.mark.parametrize("interval", [1, 3, 100])
async def test_text_behind_a_call_is_behind_it(runtime: Runtime, interval: int) -> None:
    parts = await answered(runtime, interval)
    asked = MessagesRequest(model="m", max_tokens=60, messages=[{"role": "user", "content": "hi"}])
    blocks: Any = (await MessageWriter(asked, "req_1").whole(chunks(parts)))["content"]
    assert [block.get("thinking") or block.get("text") or block.get("input") for block in blocks] == [
        "why", "Well.", {"q": "a day"}, " I say", {"q": "b"}, " So be it.",
    ]  # fmt: skip
    writer = ResponseWriter(ResponsesRequest(input="hi", store=False), "m", lambda stored: asyncio.sleep(0), [], [])
    events = [event async for event in writer.stream(ChoiceChunk(0, parts[0]), chunks(parts[1:]))]
    done = [event for event in events if event.startswith(b"event: response.function_call_arguments.done")]
    arguments = [json.loads(event.partition(b"data: ")[2])["arguments"] for event in done]
    assert arguments == ['{"q": "a day"}', '{"q": "b"}']


@pytest.mark.parametrize("interval", [1, 3, 100])
async def test_log_probabilities_of_a_text_have_no_token_of_the_reasoning(runtime: Runtime, interval: int) -> None:
    parts = await answered(runtime, interval)
    writer = ResponseWriter(ResponsesRequest(input="hi", store=False), "m", lambda stored: asyncio.sleep(0), [], [])
    items = json.loads(await writer.whole(chunks(parts)))["output"]
    first = next(item["content"][0] for item in items if item["type"] == "message")
    assert first["text"] == "Well."
    tokens = [found["token"] for found in first["logprobs"]]
    assert "Well. " in tokens
    assert not {"<think>", "wh", "y"} & set(tokens)
    assert interval > 1 or tokens == ["Well. "]  # else a marker may share the text's message


@pytest.mark.parametrize("interval", [1, 3, 100])
async def test_the_fields_of_a_split_message_are_complete(runtime: Runtime, interval: int) -> None:
    parts = await answered(runtime, interval)
    assert sum(len(part.token_ids) for part in parts) == len(ANSWER)
    assert sum(len(part.logprobs) for part in parts) == len(ANSWER)
    assert [bool(part.request_id) for part in parts] == [True] + [False] * (len(parts) - 1)
    finished = [part.finish_reason for part in parts]
    assert finished == [0] * (len(parts) - 1) + [pb.FINISH_REASON_TOOL_CALLS]
    assert all(part.usage.prompt_tokens == parts[-1].usage.prompt_tokens > 0 for part in parts)
    assert parts[-1].usage.generated_tokens == len(ANSWER)
    assert parts[-1].usage.reasoning_tokens == 4
