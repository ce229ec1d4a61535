"""Reasons of misses through gateway, worker and daemon: each caused on purpose."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway, of_node

WORDS = "the quick brown fox reads a long page about caches and writes it down for later. "


@pytest.fixture(scope="module")
def gateway(node: Node) -> Iterator[Gateway]:
    """One of a worker that keeps nothing in its pool."""
    found = of_node(node)
    yield found
    found.close()


def ask(gateway: Gateway, prompt: str, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "explain": True, **options}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def miss(gateway: Gateway, prompt: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(gateway, prompt, **options)["miss"]
    return found


@pytest.fixture
def stored(gateway: Gateway, node: Node) -> str:
    """A prompt whose chunks are stored."""
    prompt = f"{time.time_ns()} is the page of this test. " + WORDS * 5
    ask(gateway, prompt)
    node.settle()
    return prompt


def delete_all(node: Node) -> None:
    with node.cache_channel() as channel:
        CacheServiceStub(channel).Delete(cache_pb2.DeleteRequest(), timeout=10)


def test_a_hit_has_no_reason(gateway: Gateway, stored: str) -> None:
    again = ask(gateway, stored)
    assert again["miss"] is None, again


def test_new_text_is_never_seen(gateway: Gateway) -> None:
    found = miss(gateway, f"{time.time_ns()} nobody has read this. " + WORDS * 3)
    assert found["kind"] in ("never_seen", "differs"), found  # "differs" if two times begin alike
    assert found["sentence"]
    assert found["advice"]


def test_a_prompt_differs_at_the_token(gateway: Gateway, stored: str) -> None:
    # Nothing behind the change is stored elsewhere, which would be another reason.
    changed = stored.partition("quick")[0] + "slow green turtle swims in a sea that no other text of these tests has."
    tokens = [
        httpx.post(f"{gateway.url}/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in (stored, changed)
    ]
    first = next(i for i, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b)
    found = miss(gateway, changed)
    assert (found["kind"], found["position"]) == ("differs", first)


def test_deleted_text(gateway: Gateway, node: Node, stored: str) -> None:
    delete_all(node)
    found = miss(gateway, stored)
    assert (found["kind"], found["position"]) == ("deleted", 0)
    assert found["computed_tokens"] > 50


def test_expired_text(gateway: Gateway, node: Node) -> None:
    prompt = f"{time.time_ns()} lives for a second. " + WORDS * 3
    ask(gateway, prompt, cache_ttl_seconds=1)
    node.settle()
    time.sleep(1.5)
    assert miss(gateway, prompt)["kind"] == "expired"


def test_text_that_stands_elsewhere(gateway: Gateway, node: Node) -> None:
    documents = [" ".join(f"{name}{i * 7919 % 1000}" for i in range(60)) for name in ("alpha", "beta", "gamma")]
    ask(gateway, "\n\n".join(documents))
    node.settle()
    assert miss(gateway, "\n\n".join(reversed(documents)))["kind"] == "reuse_off"


def test_the_log_has_the_reason(gateway: Gateway, node: Node, stored: str) -> None:
    delete_all(node)
    # The reason may be found after the first tokens.
    answer = ask(gateway, stored, explain=False, max_tokens=100, ignore_eos=True)
    assert "miss" not in answer
    lines = node.wait_for_log(answer["id"])
    assert any("deleted" in line and "miss" in line for line in lines), lines


def test_a_skipped_cache(gateway: Gateway, stored: str) -> None:
    assert miss(gateway, stored, skip_cache=True)["kind"] == "skipped"


def test_another_salt_is_not_named(gateway: Gateway, stored: str) -> None:
    found = miss(gateway, stored, cache_salt=f"guest-{time.time_ns()}")
    assert found["kind"] == "never_seen", "a guest learns that another tenant has sent this"
    assert found["position"] == 0


def test_a_restarted_daemon_says_how_short_its_memory_is(gateway: Gateway, node: Node, stored: str) -> None:
    delete_all(node)
    node.restart_daemon()
    node.wait_attached(0)
    found = miss(gateway, stored)
    assert found["kind"] == "never_seen"
    assert found["remembered_seconds"] < 60


def test_a_dead_daemon(gateway: Gateway, node: Node, stored: str) -> None:
    node.kill("daemon")
    try:
        assert miss(gateway, stored)["kind"] == "unavailable"
    finally:
        node.start_daemon()
        node.wait_attached(0)


def test_a_stream_ends_with_the_reason(gateway: Gateway) -> None:
    body = {"prompt": f"{time.time_ns()} streams. " + WORDS, "max_tokens": 2, "explain": True, "stream": True}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=30)
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [e["miss"]["kind"] for e in events if "miss" in e] in (["never_seen"], ["differs"])
