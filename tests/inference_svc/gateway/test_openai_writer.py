"""Events of the writer, as OpenAI's own client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from kvsidecar.inference.v1 import inference_pb2 as pb
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from inference_svc.gateway.openai_requests import ChatRequest
from inference_svc.gateway.openai_writer import OpenAIWriter
from inference_svc.gateway.request_runner import ChoiceChunk


def said(choice: int, text: str, finish: Any = None) -> ChoiceChunk:
    return ChoiceChunk(choice, pb.GenerateStreamResponse(text=text, token_ids=[1], finish_reason=finish))


async def test_the_choices_of_a_chat_open_in_order_whichever_speaks_first() -> None:
    """The SDK's helper puts a choice where its first event comes, and looks for it at its index later."""

    async def others() -> AsyncIterator[ChoiceChunk]:
        for choice, text in ((2, "c"), (0, "a"), (1, "B"), (2, "C"), (0, "A")):
            yield said(choice, text, pb.FINISH_REASON_STOP if text.isupper() else None)

    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 3})
    writer, state = OpenAIWriter("id", "demo", None, request), ChatCompletionStreamState()
    events = [event async for event in writer.stream(said(1, "b"), others())]
    assert events.pop() == b"data: [DONE]\n\n"
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(json.loads(event.removeprefix(b"data: "))))
    choices = state.get_final_completion().choices
    assert [(choice.index, choice.message.content) for choice in choices] == [(0, "aA"), (1, "bB"), (2, "cC")]
