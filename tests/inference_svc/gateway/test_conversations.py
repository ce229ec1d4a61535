"""Changes of a conversation that several requests make at the same time, and ids that are no conversation's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kvsidecar.errors import UnknownResponse

from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.responses_api.conversation_store import ConversationStore, StoredResponse
from inference_svc.gateway.responses_api.stored_response_routes import StoredResponseRoutes
from tests.inference_svc.gateway.http_server import listening
from tests.inference_svc.gateway.test_worker_wait import Worker


@pytest.fixture
def growing() -> Iterator[tuple[ConversationStore, StoredResponseRoutes]]:
    """A store with an empty conversation, and the routes that change it."""
    config, store = GatewayConfig(workers="127.0.0.1:1", cache_socket=None), ConversationStore()
    keys = ApiKeys(config)
    bodies = BodyReader(config, keys)
    store.keep("t", StoredResponse.of({"id": "conv_a"}, []))
    yield store, StoredResponseRoutes(store, keys, bodies)
    bodies.close()


def answered(text: str) -> StoredResponse:
    said = {"type": "message", "role": "user", "content": text, "id": f"msg_{text}"}
    return StoredResponse.of({"id": "resp_a", "output": []}, [], [said])


async def test_items_that_arrive_at_the_same_time_are_all_kept(
    growing: tuple[ConversationStore, StoredResponseRoutes],
) -> None:
    store, routes = growing
    await asyncio.gather(*(routes.append("t", "conv_a", answered(text)) for text in "abcd"))
    found = store.find("t", "conv_a")
    assert [item["content"] for item in json.loads(found.items)] == list("abcd")
    assert [message["content"] for message in store.messages("t", "conv_a")] == list("abcd")


async def test_answers_that_end_at_the_same_time_fill_a_conversation_once(
    growing: tuple[ConversationStore, StoredResponseRoutes],
) -> None:
    """All requests began while it had room; each answer and its input may have megabytes."""
    store, routes = growing
    await asyncio.gather(*(routes.append("t", "conv_a", answered(text * 1_100_000)) for text in "abcd"))
    (item,) = json.loads(store.find("t", "conv_a").items)
    assert len(item["content"]) == 1_100_000


async def test_a_conversation_that_is_deleted_while_it_grows_stays_deleted(
    growing: tuple[ConversationStore, StoredResponseRoutes],
) -> None:
    store, routes = growing
    append = asyncio.create_task(routes.append("t", "conv_a", answered("a")))
    await asyncio.sleep(0)  # the task has read the conversation, and waits for the thread that extends it
    store.drop("t", "conv_a")
    await append
    with pytest.raises(UnknownResponse):
        store.find("t", "conv_a")


async def test_a_response_is_no_conversation_and_a_conversation_no_response(tmp_path: Path) -> None:
    """An answer in a conversation is added to it: a response would be replaced by one that no client can read."""
    worker = Worker(tmp_path / "0")
    await worker.start()
    try:
        async with (
            listening(workers=str(worker.target)) as (port, _),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
        ):
            made = (await client.post("/v1/responses", json={"input": "x"})).json()
            talk = (await client.post("/v1/conversations", json={"items": [{"role": "user", "content": "x"}]})).json()
            for param, named in (
                ("conversation", made["id"]),
                ("conversation", {"id": made["id"]}),
                ("conversation", ""),
                ("previous_response_id", talk["id"]),
            ):
                answer = await client.post("/v1/responses", json={"input": "y", param: named})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert (await client.get(f"/v1/responses/{made['id']}")).json() == made
    finally:
        await worker.stop()
