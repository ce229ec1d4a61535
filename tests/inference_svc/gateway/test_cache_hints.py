"""Cache hints from HTTP and gRPC to the daemon: TTLs of a prompt's parts, prefetch, and the end of a session."""

from __future__ import annotations

from math import inf
from typing import Any

import httpx
import pytest
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import InvalidRequest

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway

WORDS = "a sentence about nothing in particular, which is long enough to fill more than a chunk of the store "


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/{path}", json=body, timeout=120)


def stored(node: Node, salt: str) -> list[cache_pb2.ChunkInfo]:
    """A tenant's chunks, in the order of their positions."""
    node.settle()
    namespace = node.client(0).model().namespace
    with node.cache_channel() as channel:
        request = cache_pb2.ListRequest(namespace=namespace, tenant_salt=salt.encode(), page_size=1000)
        chunks = list(CacheServiceStub(channel).List(request, timeout=60).chunks)
    return sorted(chunks, key=lambda chunk: chunk.start_position)


def left(chunk: cache_pb2.ChunkInfo) -> float:
    return chunk.ttl_seconds if chunk.HasField("ttl_seconds") else inf


def chat(gateway: Gateway, salt: str, messages: list[dict[str, str]], **options: Any) -> Any:
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_salt": salt} | options
    answer = post(gateway, "v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_marked_part_of_a_chat_has_its_own_ttl(gateway: Gateway, two: Node) -> None:
    """An hour for the system message, five minutes for the documents, one minute for the rest."""
    messages = [say("system", "S " + WORDS * 25), say("user", "D " + WORDS * 25), say("user", "Q " + WORDS * 25)]
    parts = [{"messages": 1, "ttl_seconds": 3600}, {"messages": 2, "ttl_seconds": 300}]
    chat(gateway, "parts", messages, cache_parts=parts, cache_ttl_seconds=60)
    # As long as these chats with what opens an answer, which is a few tokens.
    ends = [len(two.client(0).tokenize([*messages[:n]])) for n in (1, 2)]
    seen = set[int]()
    for chunk in stored(two, "parts"):
        start = chunk.start_position
        if all(abs(start - end) > 16 for end in ends):
            most, least = (3600, 300) if start < ends[0] else (300, 60) if start < ends[1] else (60, 0)
            assert least < left(chunk) <= most, start
            seen.add(most)
    assert seen == {3600, 300, 60}
    # Without a TTL behind the parts, that of the last one applies there.
    chat(gateway, "parts", messages, cache_parts=[{"messages": 1, "ttl_seconds": 7200}])
    chunks = stored(two, "parts")
    assert 3600 < left(chunks[0]) <= 7200
    assert 3600 < left(chunks[-1]) <= 7200


def test_parts_of_token_ids_and_of_a_warmed_chat(gateway: Gateway, two: Node) -> None:
    ids = two.client(0).tokenize("T " + WORDS * 20)
    half = len(ids) // 2
    parts = [{"tokens": half, "ttl_seconds": 3000}]
    answer = post(
        gateway, "v1/completions", prompt=ids, max_tokens=1, cache_salt="ids", cache_parts=parts, cache_ttl_seconds=30
    )
    assert answer.status_code == 200, answer.text
    chunks = stored(two, "ids")
    assert 30 < left(chunks[0]) <= 3000
    assert left(chunks[-1]) <= 30
    messages = [say("system", "W " + WORDS * 12), say("user", "X " + WORDS * 12)]
    warm = {"cache_parts": [{"messages": 1, "ttl_seconds": 3000}], "cache_ttl_seconds": 30, "cache_salt": "warm"}
    assert post(gateway, "kvsidecar/v1/warm", messages=messages, **warm).status_code == 200
    chunks = stored(two, "warm")
    assert 30 < left(chunks[0]) <= 3000
    assert left(chunks[-1]) <= 30


def test_the_end_of_a_session_removes_what_it_alone_used(gateway: Gateway, two: Node) -> None:
    system = say("system", "An agent. " + WORDS * 12)

    def turn(session: str, text: str) -> int:
        answer = chat(gateway, "agents", [system, say("user", text + WORDS * 10)], cache_session=session)
        two.settle()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    turn("one", "first task ")
    alone = {chunk.prefix_hash for chunk in stored(two, "agents")}
    turn("two", "second task ")
    before = {chunk.prefix_hash for chunk in stored(two, "agents")}
    assert alone < before
    body = {"cache_salt": "agents", "cache_session": "one"}
    released = post(gateway, "kvsidecar/v1/release", **body).json()["released_chunks"]
    after = {chunk.prefix_hash for chunk in stored(two, "agents")}
    assert released == len(before - after) > 0
    assert before - after < alone, "the system message stays: another session uses it"
    assert post(gateway, "kvsidecar/v1/release", **body).json() == {"released_chunks": 0}
    other = post(gateway, "kvsidecar/v1/release", cache_salt="a stranger", cache_session="two")
    assert other.json() == {"released_chunks": 0}, "another tenant's session of that name"
    assert {chunk.prefix_hash for chunk in stored(two, "agents")} == after
    assert two.client(0).release_session("two", tenant_salt=b"agents") > 0


def test_prefetch_brings_chunks_into_memory_and_computes_nothing(gateway: Gateway, two: Node) -> None:
    text = "P " + WORDS * 20
    body = {"prompt": text, "cache_salt": "ahead", "prefetch": True}
    assert post(gateway, "kvsidecar/v1/warm", **body).json()["stored_tokens"] == 0
    assert not stored(two, "ahead")
    tokens = post(gateway, "kvsidecar/v1/warm", prompt=text, cache_salt="ahead").json()["prompt_tokens"]
    stored(two, "ahead")
    found = two.client(0).warm(text, tenant_salt=b"ahead", prefetch=True)
    assert found.prompt_tokens == tokens
    assert tokens - 32 <= found.stored_tokens <= tokens


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache_parts": [{"ttl_seconds": 5}]}, "needs messages or tokens"),
        ({"cache_parts": [{"messages": 1, "tokens": 1, "ttl_seconds": 5}]}, "needs messages or tokens, and not both"),
        ({"cache_parts": [{"messages": 2, "ttl_seconds": 5}]}, "ends at 2 messages; .* at most the prompt's 1"),
        ({"cache_parts": [{"messages": 1, "ttl_seconds": 5}] * 2}, "ends at 1 messages; ends must rise"),
        ({"cache_parts": [{"tokens": 1, "ttl_seconds": 5}]}, "of messages in a chat"),
        ({"cache_parts": [{"messages": 1, "ttl_seconds": 0}]}, "cache_parts"),
        ({"cache_parts": [{"messages": 1, "ttl_seconds": 5}] * 17}, "cache_parts.* at most 16"),
        ({"cache_parts": {"messages": 1}}, "cache_parts"),
        ({"cache_session": "s" * 129}, "cache_session.*128"),
        ({"cache_session": "ü" * 65}, "cache_session has 130 bytes; at most 128"),
    ],
)
def test_a_wrong_hint_is_refused_with_a_sentence(gateway: Gateway, options: dict[str, Any], named: str) -> None:
    answer = post(gateway, "v1/chat/completions", messages=[say("user", "x")], max_tokens=1, **options)
    assert answer.status_code == 400, answer.text
    with pytest.raises(InvalidRequest, match=named):
        raise InvalidRequest(answer.json()["error"]["message"])


def test_wrong_hints_over_grpc_are_refused_too(two: Node) -> None:
    client = two.client(0)
    for options, named in (
        ({"cache_parts": [{"messages": 1, "ttl_seconds": 5}]}, "text has one part"),
        ({"cache_parts": [{"ttl_seconds": 5}]}, "needs ttl_seconds, and"),
        ({"cache_session": "s" * 129}, "cache_session has 129 bytes"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            client.generate("x", max_tokens=1, **options)
    with pytest.raises(InvalidRequest, match="the session has no name"):
        client.release_session("")
