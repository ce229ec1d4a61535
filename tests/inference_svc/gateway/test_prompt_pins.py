"""Pins and prewarming over HTTP: a real gateway, worker and daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from openai.types.responses.response_create_params import PromptCacheOptions

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway, of_node

WORDS = "a sentence about nothing in particular, which is long enough to fill more than a chunk of the store "
PIN, UNPIN = "/kvsidecar/v1/pin", "/kvsidecar/v1/unpin"


@pytest.fixture(scope="module")
def small() -> Iterator[Node]:
    """A node with a small store, whose worker keeps no sequences: all cached tokens come from the daemon."""
    flags = {"resident_sequences": 0}
    with Node("demo", arena_bytes="32MiB", store_bytes="16MiB", pool_bytes="32MiB", worker_flags=flags) as node:
        yield node


@pytest.fixture(scope="module")
def open_gateway(small: Node) -> Iterator[Gateway]:
    found = of_node(small)
    yield found
    found.close()


def post(gateway: Gateway, path: str, key: str = "", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{gateway.url}{path}", json=body, headers=headers, timeout=120)


def pinned(node: Node, salt: str) -> list[bool]:
    """Return True for each pinned chunk of a tenant, else False, in the order of positions."""
    namespace = node.client(0).model().namespace
    with node.cache_channel() as channel:
        request = cache_pb2.ListRequest(namespace=namespace, tenant_salt=salt.encode(), page_size=1000)
        chunks = list(CacheServiceStub(channel).List(request, timeout=60).chunks)
    return [chunk.pinned for chunk in sorted(chunks, key=lambda chunk: chunk.start_position)]


def flood(gateway: Gateway, node: Node, name: str) -> None:
    """Store prompts until the store evicts chunks."""
    for i in range(200):
        answer = post(gateway, "/kvsidecar/v1/warm", prompt=f"{name} {i} " + WORDS * 25, cache_salt="flood")
        assert answer.status_code == 200, answer.text
        node.settle()
        if node.cache_stats().durable_evictions > 20:
            return
    raise AssertionError("the store does not fill up")


def test_a_pinned_prompt_survives_floods_and_a_kill_until_it_is_unpinned(open_gateway: Gateway, small: Node) -> None:
    messages = [{"role": "system", "content": "Rules. " + WORDS * 12}]
    answer = post(open_gateway, PIN, messages=messages, cache_salt="rules")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["prompt_tokens"] - 16 <= found["stored_tokens"] <= found["prompt_tokens"]
    assert found["pinned_tokens"] >= found["stored_tokens"] > 100
    assert pinned(small, "rules") == [True] * found["pinned_chunks"]
    small.settle()
    small.kill("daemon")
    small.start_daemon()
    small.wait_attached(0)
    flood(open_gateway, small, "first")
    assert pinned(small, "rules") == [True] * found["pinned_chunks"]
    asked = {"messages": [*messages, {"role": "user", "content": "And now?"}], "max_tokens": 1, "cache_salt": "rules"}
    usage = post(open_gateway, "/v1/chat/completions", **asked).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= found["stored_tokens"] - 16
    stranger = post(open_gateway, UNPIN, pin=found["pin"], cache_salt="another")
    assert (stranger.status_code, stranger.json()["error"]["code"]) == (404, "chunk_not_found")
    ended = post(open_gateway, UNPIN, pin=found["pin"], cache_salt="rules")
    assert ended.json() == {"unpinned_chunks": found["pinned_chunks"]}
    assert not any(pinned(small, "rules"))
    assert post(open_gateway, UNPIN, pin=found["pin"], cache_salt="rules").status_code == 404


def test_a_clients_pins_end_at_its_share_and_an_operators_do_not(small: Node) -> None:
    locked = of_node(small, "--api-key", "guest", "--operator-key", "chief")
    try:
        refused, names = None, []
        for i in range(40):
            answer = post(locked, PIN, "guest", prompt=f"text {i} " + WORDS * 6, cache_salt="quota")
            if answer.status_code != 200:
                refused = answer
                break
            names.append(answer.json()["pin"])
        assert refused is not None, "a quarter of all pins is no limit"
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert "this caller may pin" in refused.json()["error"]["message"]
        assert names
        of_chief = post(locked, PIN, "chief", prompt=f"text {len(names)} " + WORDS * 6, cache_salt="quota")
        assert of_chief.status_code == 200, of_chief.text
        for name in names:
            assert post(locked, UNPIN, "guest", pin=name, cache_salt="quota").status_code == 200
        again = post(locked, PIN, "guest", prompt="once more " + WORDS * 6, cache_salt="quota")
        assert again.status_code == 200, "what was unpinned leaves the share"
        for name in (of_chief.json()["pin"], again.json()["pin"]):
            assert post(locked, UNPIN, "chief", pin=name, cache_salt="quota").status_code == 200
        assert post(locked, PIN, prompt="x").status_code == 401
    finally:
        locked.close()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (PIN, {}, "one of prompt and messages"),
        (PIN, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "one of prompt and messages"),
        (PIN, {"prompt": "x", "prefetch": True}, "prefetch is not an option"),
        (PIN, {"prompt": "x", "within_seconds": 0}, "within_seconds"),
        (UNPIN, {}, "pin is missing"),
        (UNPIN, {"pin": "../" * 20}, "pin is"),
        (UNPIN, {"pin": "0" * 63}, "pin is"),
        (UNPIN, {"pin": 7}, "pin is"),
    ],
)
def test_a_wrong_pin_is_refused_with_a_sentence(
    open_gateway: Gateway, path: str, body: dict[str, Any], named: str
) -> None:
    answer = post(open_gateway, path, **body)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


def test_a_gateway_without_its_daemon_says_that_it_cannot_pin(small: Node) -> None:
    alone = Gateway(small, "--workers", str(small.worker_socket(0)), "--cache-socket", str(small.folder / "none.sock"))
    try:
        answer = post(alone, PIN, prompt="a text " * 40)
    finally:
        alone.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "none.sock" in answer.json()["error"]["message"]


# ---- prewarming -------------------------------------------------------------------------------------------------


def test_a_prewarmed_response_has_no_output_and_the_next_one_is_cached(open_gateway: Gateway) -> None:
    asked: Any = {"model": "demo", "instructions": "Prewarmed rules. " + WORDS * 12, "max_output_tokens": 8}
    asked |= {"temperature": 0}
    client, options = open_gateway.client, {"prompt_cache_options": {"prewarm": True, "mode": "implicit", "ttl": "30m"}}
    cold = client.responses.create(input="hello", **asked, extra_body=options)
    assert (cold.output, cold.status, cold.incomplete_details) == ([], "completed", None)
    assert cold.usage is not None
    assert cold.usage.output_tokens == 0 < cold.usage.input_tokens
    events = list(client.responses.create(input="hello", stream=True, **asked, extra_body=options))
    kinds = [event.type for event in events]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]
    warm = client.responses.create(input="hello again", **asked)
    assert warm.output
    assert warm.usage is not None
    assert warm.usage.input_tokens_details.cached_tokens > 0.8 * cold.usage.input_tokens


def test_a_prewarmed_turn_is_no_part_of_its_conversation(open_gateway: Gateway) -> None:
    client = open_gateway.client
    conversation = client.conversations.create()
    options = {"prompt_cache_options": {"prewarm": True}}
    client.responses.create(model="demo", input="hello", conversation=conversation.id, extra_body=options)
    assert list(client.conversations.items.list(conversation.id)) == []
    client.responses.create(model="demo", input="hello", conversation=conversation.id, max_output_tokens=1)
    assert list(client.conversations.items.list(conversation.id))


@pytest.mark.parametrize("stream", [False, True])
def test_a_prewarmed_chat_answers_nothing_whatever_it_asks_for(open_gateway: Gateway, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    asked: Any = {
        "model": "demo", "messages": [{"role": "user", "content": f"{stream} prewarm " + WORDS * 12}],
        "tools": [tool], "tool_choice": "required", "logprobs": True, "n": 2, "stream": stream,
    }  # fmt: skip
    options: Any = {"prompt_cache_options": {"prewarm": True}, "min_tokens": 5, "return_token_ids": True}
    answer = open_gateway.client.chat.completions.create(**asked, extra_body=options)
    if stream:
        choices = [choice for chunk in answer for choice in chunk.choices]
        assert not any(choice.delta.content or choice.delta.tool_calls for choice in choices)
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"] * 2
    else:
        assert {(choice.message.content, choice.finish_reason) for choice in answer.choices} == {("", "stop")}
        assert not any(choice.message.tool_calls for choice in answer.choices)
        assert answer.usage.completion_tokens == 0
    del asked["tool_choice"], asked["stream"], asked["n"]
    warm = open_gateway.client.chat.completions.create(**asked, max_tokens=1).usage
    assert warm is not None
    assert warm.prompt_tokens_details is not None
    assert (warm.prompt_tokens_details.cached_tokens or 0) > 0.8 * warm.prompt_tokens


@pytest.mark.parametrize("options", [{"prewarm": "yes"}, {"prewarm": 1}, {"prewarm": None}, [True], "prewarm"])
def test_what_does_not_ask_to_prewarm_gets_an_answer(open_gateway: Gateway, options: Any) -> None:
    body = {"prompt": "say something", "max_tokens": 3, "prompt_cache_options": options, "ignore_eos": True}
    answer = post(open_gateway, "/v1/completions", **body).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_the_sdks_type_of_the_options_has_no_member_that_is_unknown_here() -> None:
    assert set(PromptCacheOptions.__annotations__) == {"comparison_response_id", "mode", "prewarm", "ttl"}
