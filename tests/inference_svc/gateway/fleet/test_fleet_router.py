"""Who gets a prompt: equal for all gateways, by what nodes have, then by load."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.gateway.fleet.fleet_router import (
    MAX_LOAD_DIFFERENCE,
    MAX_QUERY_ALL_NODES,
    RouteCandidate,
    choose_node,
    nodes_to_query,
    prompt_prefix_hashes,
)
from inference_svc.gateway.fleet.hash_ring import HashRing

LONG = "a text that says something at length and goes on for a while, as texts do. " * 40
texts = st.text(alphabet="ab", max_size=3000)


def chat(*said: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user" if i % 2 == 0 else "assistant", "content": s} for i, s in enumerate(said)]
    } | more


def test_a_later_turn_begins_as_the_earlier_one_did() -> None:
    first = prompt_prefix_hashes(chat(LONG, n=1))
    second = prompt_prefix_hashes(chat(LONG, "an answer", "and what then?", temperature=1))
    assert set(first.digests) <= set(second.digests)
    assert first.session_key == second.session_key


@given(texts, texts)
def test_texts_share_the_beginnings_that_are_alike(one: str, other: str) -> None:
    alike = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    shared = set(prompt_prefix_hashes({"prompt": one}).digests) & set(prompt_prefix_hashes({"prompt": other}).digests)
    if one != other:
        assert len(shared) == sum(256 << i <= alike for i in range(8))


@pytest.mark.parametrize(
    "other", [chat(LONG, cache_salt="s"), chat("b" + LONG), chat(LONG, tools=[{"type": "function"}])]
)
def test_another_tenant_or_beginning_is_another_prompt(other: dict[str, Any]) -> None:
    one = prompt_prefix_hashes(chat(LONG))
    assert not set(one.digests) & set(prompt_prefix_hashes(other).digests)
    assert one.session_key != prompt_prefix_hashes(other).session_key


@pytest.mark.parametrize(
    "body", [{}, {"messages": 5}, {"prompt": [1, 2, 3]}, {"input": "x"}, {"messages": [None, "\ud800"]}]
)
def test_whatever_is_sent_has_a_beginning(body: dict[str, Any]) -> None:
    assert prompt_prefix_hashes(body).digests


def test_the_most_read_wins_until_it_is_busier_than_that_is_worth() -> None:
    prompt = prompt_prefix_hashes(chat(LONG))

    def chosen(warm_load: float, held: int) -> str:
        return choose_node([RouteCandidate("warm", warm_load, held), RouteCandidate("cold", 0.0)], prompt, 1000).name

    assert chosen(0, 1000) == chosen(MAX_LOAD_DIFFERENCE - 1, 1000) == "warm"
    assert chosen(MAX_LOAD_DIFFERENCE + 1, 1000) == "cold"
    assert chosen(MAX_LOAD_DIFFERENCE / 2 - 0.5, 500) == "warm"
    assert chosen(MAX_LOAD_DIFFERENCE / 2 + 0.5, 500) == "cold"


def test_ties_are_broken_alike_whatever_the_order_and_spread() -> None:
    names = [f"http://10.0.0.{i}:8000" for i in range(4)]
    got: Counter[str] = Counter()
    for i in range(200):
        prompt = prompt_prefix_hashes(chat(f"question {i}"))
        found = {choose_node([RouteCandidate(n, 0.0) for n in order], prompt, 0).name for order in (names, names[::-1])}
        assert len(found) == 1
        got.update(found)
    assert min(got.values()) > 20


def test_of_many_nodes_a_few_are_asked_and_the_earlier_turns_among_them() -> None:
    nodes = [RouteCandidate(f"http://10.0.{i // 250}.{i % 250}:80", load=1.0) for i in range(1000)]
    ring = HashRing(node.name for node in nodes)
    first = prompt_prefix_hashes(chat(LONG))
    second = prompt_prefix_hashes(chat(LONG, "yes", LONG))
    asked = {one.name for one in nodes_to_query(ring, nodes, second)}
    assert len(asked) <= MAX_QUERY_ALL_NODES
    assert {ring.first(digest, [n.name for n in nodes]) for digest in first.digests} <= asked
    idle = RouteCandidate("http://10.0.0.7:80", load=0.0)
    assert idle in nodes_to_query(ring, [idle, *(n for n in nodes if n.name != idle.name)], second)


def test_a_node_that_goes_moves_only_what_led_to_it() -> None:
    names = [f"node-{i}" for i in range(40)]
    ring, digests = HashRing(names), [prompt_prefix_hashes(chat(f"question {i}")).session_key for i in range(400)]
    before = [ring.first(digest, names) for digest in digests]
    after = [ring.first(digest, names[1:]) for digest in digests]
    assert all(a == b for a, b in zip(after, before, strict=True) if b != names[0])
    assert max(Counter(before).values()) < 40
