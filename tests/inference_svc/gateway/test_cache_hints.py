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
from inference_svc.gateway.openai_requests import CompletionRequest
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


def retained_bytes(node: Node, salt: str) -> int:
    """Bytes of a tenant's retained chunks."""
    with node.cache_channel() as channel:
        request = cache_pb2.StatsRequest(namespace=node.client(0).model().namespace, tenant_salt=salt.encode())
        return CacheServiceStub(channel).Stats(request, timeout=60).retained_bytes


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def action(kind: str, payload: dict[str, Any], version: str = "1.0") -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def left(chunk: cache_pb2.ChunkInfo) -> float:
    return chunk.ttl_seconds if chunk.HasField("ttl_seconds") else inf


def chat(gateway: Gateway, salt: str, messages: list[dict[str, str]], **options: Any) -> Any:
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_salt": salt} | options
    answer = post(gateway, "v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_breakpoints_of_a_chat_retain_its_beginnings(gateway: Gateway, two: Node) -> None:
    """An hour for the system message, five minutes for the documents; the rest expires after a minute."""
    messages = [say("system", "S " + WORDS * 25), say("user", "D " + WORDS * 25), say("user", "Q " + WORDS * 25)]
    points = [{"messages": 1, "retain_seconds": 3600}, {"messages": 2, "retain_seconds": 300}]
    chat(gateway, "parts", messages, cache_breakpoints=points, cache_ttl_seconds=60)
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
    chat(gateway, "plain", messages, cache_breakpoints=points)
    assert {left(chunk) for chunk in stored(two, "plain")} == {inf}, "a retention alone is no TTL"
    assert retained_bytes(two, "plain") > 0


def test_breakpoints_in_tokens_and_of_a_warmed_chat(gateway: Gateway, two: Node) -> None:
    ids = two.client(0).tokenize("T " + WORDS * 20)
    points = [{"tokens": len(ids) // 2, "retain_seconds": 3000}]
    hints = {"cache_breakpoints": points, "cache_ttl_seconds": 30}
    answer = post(gateway, "v1/completions", prompt=ids, max_tokens=1, cache_salt="ids", **hints)
    assert answer.status_code == 200, answer.text
    chunks = stored(two, "ids")
    assert 30 < left(chunks[0]) <= 3000
    assert left(chunks[-1]) <= 30
    messages = [say("system", "W " + WORDS * 12), say("user", "X " + WORDS * 12)]
    hints = {"cache_breakpoints": [{"messages": 1, "retain_seconds": 3000}], "cache_ttl_seconds": 30}
    assert post(gateway, "kvsidecar/v1/warm", messages=messages, cache_salt="warm", **hints).status_code == 200
    chunks = stored(two, "warm")
    assert 30 < left(chunks[0]) <= 3000
    assert left(chunks[-1]) <= 30


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "v1/messages",
            {
                "system": [{"type": "text", "text": "A " + WORDS * 20, "cache_control": {"type": "ephemeral"}}],
                "messages": [say("user", "B " + WORDS * 20)],
            },
        ),
        (
            "v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "system",
                        "content": [{"type": "text", "text": "C " + WORDS * 20, "prompt_cache_breakpoint": {}}],
                    },
                    say("user", "D " + WORDS * 20),
                ],
                "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
            },
        ),
        (
            "v1/responses",
            {
                "input": [
                    {
                        "role": "system",
                        "content": [{"type": "input_text", "text": "H " + WORDS * 20, "prompt_cache_breakpoint": {}}],
                    },
                    say("user", "I " + WORDS * 20),
                ],
            },
        ),
        (
            "v1/chat/completions",
            {
                "messages": [say("system", "E " + WORDS * 20), say("user", "F " + WORDS * 20)],
                "kv_hints": envelope(
                    action("kv.retain", {"directives": [{"end": 300, "priority": 50, "duration": 300}]}),
                    action("kv.fetch", {"block_hashes": list(range(1000))}),
                    action("kv.demote", {}),
                ),
            },
        ),
    ],
    ids=["cache_control", "prompt_cache_breakpoint", "responses", "kv_hints"],
)
def test_each_protocols_hint_retains_the_beginning_of_the_prompt(
    gateway: Gateway, two: Node, path: str, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """The system message is retained and the rest is not; nothing gets a TTL."""
    salt = request.node.callspec.id
    length = "max_output_tokens" if path == "v1/responses" else "max_tokens"
    answer = post(gateway, path, model="demo", cache_salt=salt, **{length: 2}, **body)
    assert answer.status_code == 200, answer.text
    chunks = stored(two, salt)
    assert {left(chunk) for chunk in chunks} == {inf}, "chunks stay as long as without the hint"
    assert 0 < retained_bytes(two, salt) < sum(chunk.payload_bytes for chunk in chunks)


@pytest.mark.parametrize(
    "body",
    [{"cache_control": {"type": "ephemeral", "ttl": "1h"}}, {}],
    ids=["top-level cache_control", "none"],
)
def test_a_message_without_breakpoints_is_retained_as_a_whole_or_not_at_all(
    gateway: Gateway, two: Node, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    salt = request.node.callspec.id.replace(" ", "-")
    messages = [say("user", "G " + WORDS * 20)]
    answer = post(gateway, "v1/messages", model="demo", max_tokens=2, messages=messages, cache_salt=salt, **body)
    assert answer.status_code == 200, answer.text
    size = sum(chunk.payload_bytes for chunk in stored(two, salt))
    assert retained_bytes(two, salt) == (size if body else 0)


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
        ({"cache_breakpoints": [{"retain_seconds": 5}]}, "needs messages or tokens"),
        ({"cache_breakpoints": [{"messages": 1, "tokens": 1, "retain_seconds": 5}]}, "needs .* and not both"),
        ({"cache_breakpoints": [{"messages": 0, "retain_seconds": 5}]}, "cache_breakpoints"),
        ({"cache_breakpoints": [{"messages": 1, "retain_seconds": 0}]}, "cache_breakpoints"),
        ({"cache_breakpoints": [{"messages": 1, "retain_seconds": 5}] * 17}, "cache_breakpoints.* at most 16"),
        ({"cache_breakpoints": {"messages": 1}}, "cache_breakpoints"),
        ({"cache_retain_seconds": 2_592_001}, "cache_retain_seconds"),
        ({"cache_priority": "high"}, "cache_priority"),
        ({"cache_session": "s" * 129}, "cache_session.*128"),
        ({"cache_session": "\u00fc" * 65}, "cache_session has 130 bytes; at most 128"),
    ],
)
def test_a_wrong_hint_is_refused_with_a_sentence(gateway: Gateway, options: dict[str, Any], named: str) -> None:
    answer = post(gateway, "v1/chat/completions", messages=[say("user", "x")], max_tokens=1, **options)
    assert answer.status_code == 400, answer.text
    with pytest.raises(InvalidRequest, match=named):
        raise InvalidRequest(answer.json()["error"]["message"])


@pytest.mark.parametrize("directive", [{}, {"end": 300, "covers_output": True}])
@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 600),
        ({"cache_retain_seconds": 60}, 600),
        ({"cache_retain_seconds": 6000}, 6000),
        ({"prompt_cache_options": {"ttl": "1h"}}, 3600),
    ],
)
def test_a_hint_for_the_whole_prompt_retains_the_answer(
    directive: dict[str, Any], fields: dict[str, Any], seconds: int
) -> None:
    """It became a breakpoint, and a breakpoint ends at the end of the prompt at the latest."""
    directives = [directive | {"priority": 50, "duration": 600}, {"end": 64, "priority": 50, "duration": 9000}]
    hints = envelope(action("kv.retain", {"directives": directives}))
    options = CompletionRequest(prompt="x", kv_hints=hints, **fields).cache_options()
    assert options.retain_seconds == seconds
    assert [(point.tokens, point.retain_seconds) for point in options.breakpoints] == [(64, 9000)]


@pytest.mark.parametrize(
    "hints",
    [
        7,
        {},
        {"actions": [7, None, {}, {"action_type": 3}]},
        envelope(action("kv.retain", {"directives": [{"priority": 1, "end": -1}]})),
        envelope(*[action("kv.share", {})] * 10_000),
        envelope(action("kv.retain", {"directives": [{"priority": 50, "end": i + 1} for i in range(128)]})),
    ],
)
def test_an_envelope_is_no_reason_to_refuse_a_request(gateway: Gateway, hints: Any) -> None:
    answer = post(gateway, "v1/chat/completions", messages=[say("user", "x")], max_tokens=1, kv_hints=hints)
    assert answer.status_code == 200, answer.text


def test_marks_on_every_message_are_no_reason_to_refuse_a_request(gateway: Gateway) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    many = [
        {"role": ("user", "assistant")[i % 2], "content": [{"type": "text", "text": "x", **mark}]} for i in range(41)
    ]
    for path in ("v1/messages", "v1/chat/completions"):
        answer = post(gateway, path, model="demo", messages=many, max_tokens=1)
        assert answer.status_code == 200, answer.text


def test_wrong_hints_over_grpc_are_refused_too(two: Node) -> None:
    client = two.client(0)
    for options, named in (
        ({"cache_breakpoints": [{"messages": 1, "retain_seconds": 5}]}, "messages \\(in chats\\) or tokens"),
        ({"cache_breakpoints": [{"retain_seconds": 5}]}, "needs retain_seconds, and"),
        ({"cache_breakpoints": [{"tokens": 1, "retain_seconds": 5}] * 17}, "has 17 items; at most 16"),
        ({"cache_retain_seconds": 0}, "cache_retain_seconds is 0"),
        ({"cache_session": "s" * 129}, "cache_session has 129 bytes"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            client.generate("x", max_tokens=1, **options)
    with pytest.raises(InvalidRequest, match="the session has no name"):
        client.release_session("")
