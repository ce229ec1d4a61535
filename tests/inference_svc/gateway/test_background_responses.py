"""Responses in the background: queued, polled, continued, cancelled, deleted, and never without a limit."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from kvsidecar.errors import Overloaded
from kvsidecar.inference.v1 import inference_pb2 as pb
from openai.types.responses import Response

from benchmarks.node import Node
from inference_svc.gateway.request_runner import ChoiceChunk
from inference_svc.gateway.responses_api.background_responses import BackgroundResponses
from inference_svc.gateway.responses_api.conversation_store import ConversationStore, StoredResponse
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from tests.inference_svc.gateway.conftest import Gateway

LONG: dict[str, Any] = {"max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}


def create(gateway: Gateway, **options: Any) -> Response:
    response: Response = gateway.client.responses.create(
        **{"model": "demo", "input": "tell me a story", "background": True, "temperature": 0} | options
    )
    return response


def ended(gateway: Gateway, response: Response) -> Response:
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        response = gateway.client.responses.retrieve(response.id)
    return response


def test_a_response_is_queued_and_then_complete_as_if_it_had_been_waited_for(gateway: Gateway) -> None:
    options = {"max_output_tokens": 12, "temperature": 0, "instructions": "Be brief."}
    queued = create(gateway, **options)
    assert (queued.status, queued.background, queued.output, queued.usage) == ("queued", True, [], None)
    done = ended(gateway, queued)
    waited = create(gateway, **options, background=False)
    assert done.id == queued.id
    assert (done.status, done.output_text) == (waited.status, waited.output_text)
    assert done.usage is not None
    assert waited.usage is not None
    assert done.usage.output_tokens == waited.usage.output_tokens
    count = gateway.client.responses.input_tokens.count
    follow: Any = {"model": "demo", "input": "and then?"}
    assert (
        count(previous_response_id=done.id, **follow).input_tokens
        == count(previous_response_id=waited.id, **follow).input_tokens
    )
    assert gateway.client.responses.cancel(done.id).status == done.status, "what has ended stays as it is"


def test_a_cancelled_response_stays_cancelled_and_leaves_the_worker(gateway: Gateway, two: Node) -> None:
    response = create(gateway, **LONG)
    deadline = time.monotonic() + 30
    while not sum(two.client(i).stats().running for i in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert gateway.client.responses.retrieve(response.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="no answer to continue from"):
        create(gateway, previous_response_id=response.id)
    assert gateway.client.responses.cancel(response.id).status == "cancelled"
    while sum(two.client(i).stats().running for i in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert gateway.client.responses.retrieve(response.id).status == "cancelled"
    assert gateway.client.responses.cancel(response.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="no answer to continue from"):
        create(gateway, previous_response_id=response.id)


def test_a_deleted_response_is_cancelled_first(gateway: Gateway, two: Node) -> None:
    response = create(gateway, **LONG)
    gateway.client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        gateway.client.responses.retrieve(response.id)
    deadline = time.monotonic() + 30
    while sum(two.client(i).stats().running for i in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(openai.NotFoundError):
        gateway.client.responses.retrieve(response.id)


def test_a_response_that_cannot_be_computed_says_why(gateway: Gateway) -> None:
    failed = ended(gateway, create(gateway, input="hello " * 9000))
    assert (failed.status, failed.output) == ("failed", [])
    assert failed.error is not None
    assert "too long" in failed.error.message


def test_a_tenant_has_so_many_in_the_background_and_no_more(gateway: Gateway) -> None:
    made = []
    try:
        for _ in range(16):
            made.append(create(gateway, **LONG))
        with pytest.raises(openai.RateLimitError, match="16 of your responses run in the background"):
            create(gateway, **LONG)
    finally:
        for response in made:
            gateway.client.responses.cancel(response.id)
    assert ended(gateway, create(gateway, max_output_tokens=2)).status == "incomplete"


async def endless() -> AsyncIterator[ChoiceChunk]:
    """An answer without an end."""
    await asyncio.Event().wait()
    yield  # type: ignore[misc]


def writer() -> ResponseWriter:
    return ResponseWriter(ResponsesRequest(input="hi", background=True), "m", lambda stored: asyncio.sleep(0), [], [])


async def test_responses_that_start_at_the_same_time_do_not_exceed_the_limit() -> None:
    background = BackgroundResponses(ConversationStore())
    started = await asyncio.gather(
        *(background.start("t", writer(), endless()) for _ in range(40)), return_exceptions=True
    )
    await background.close()
    assert sum(isinstance(one, bytes) for one in started) == 16
    assert sum(isinstance(one, Overloaded) for one in started) == 24


async def test_a_response_that_is_cancelled_twice_is_cancelled() -> None:
    store = ConversationStore()
    background = BackgroundResponses(store)
    queued = json.loads(await background.start("t", writer(), endless()))["id"]

    async def again() -> bool:
        await asyncio.sleep(0)  # the first cancellation has reached the task, which stores the status
        return await background.cancel("t", queued)

    assert await asyncio.gather(background.cancel("t", queued), again()) == [True, True]
    assert json.loads(store.find("t", queued).response)["status"] == "cancelled"


async def test_a_complete_response_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may have read it as complete; it was encoded once more after it was stored, and could be cancelled."""
    store, stored = ConversationStore(), asyncio.Event()

    async def keep(one: StoredResponse) -> None:
        store.keep("t", one)
        stored.set()

    async def pieces() -> AsyncIterator[ChoiceChunk]:
        yield ChoiceChunk(0, pb.GenerateStreamResponse(text="hello", finish_reason=pb.FINISH_REASON_STOP))

    background = BackgroundResponses(store)
    asked = ResponsesRequest(input="hi", background=True)
    queued = json.loads(await background.start("t", ResponseWriter(asked, "m", keep, [], []), pieces()))["id"]
    await stored.wait()
    await background.cancel("t", queued)
    assert json.loads(store.find("t", queued).response)["status"] == "completed"


def test_a_conversation_gets_the_items_when_the_response_is_complete(gateway: Gateway) -> None:
    conversation = gateway.client.conversations.create()
    response = create(gateway, conversation=conversation.id, max_output_tokens=4)
    ended(gateway, response)
    items = list(gateway.client.conversations.items.list(conversation.id, order="asc"))
    assert [getattr(item, "role", "") for item in items] == ["user", "assistant"]


def test_the_raw_messages_are_what_the_model_read_and_wrote(gateway: Gateway, two: Node) -> None:
    for stream in (False, True):
        options = {"enable_response_messages": True}
        answer: Any = create(
            gateway, background=False, stream=stream, max_output_tokens=6, temperature=0, extra_body=options
        )
        if stream:
            answer = list(answer)[-1].response
        (given,), (said,) = answer.input_messages, answer.output_messages
        assert (given["type"], said["type"]) == ("raw_message_tokens",) * 2
        assert "tell me a story" in given["message"]
        assert len(given["tokens"]) == answer.usage.input_tokens
        assert len(said["tokens"]) == answer.usage.output_tokens
        assert said["message"] == answer.output_text
