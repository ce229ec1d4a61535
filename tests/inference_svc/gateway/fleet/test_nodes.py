"""Two nodes of real processes behind two gateways of the fleet: reuse and answers, also over restarts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from kvsidecar.cli.root_command import app
from typer.testing import CliRunner

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway, of_node

MOST_TOKENS = 8
# Longer than any test: a node's gateway that waits for a worker that it has lost keeps its request.
PATIENT = ("--worker-wait-seconds", "600")


@dataclass
class Fleet:
    nodes: list[Node]
    gateways: list[Gateway]  # of the nodes
    fronts: list[Gateway]  # of the fleet
    gone: list[Gateway] = field(default_factory=list)

    def served(self) -> list[int]:
        """Return the number of requests of each node."""
        return [node.client().stats().requests for node in self.nodes]

    def restart(self, i: int) -> None:
        """Stop a node in order, and start it again at the same address."""
        gateway, node = self.gateways[i], self.nodes[i]
        gateway.close()
        for name in ("worker-0", "daemon"):
            node.kill(name, 15)
        node.start_daemon()
        node.start_worker(0)
        self.gateways[i] = of_node(node, *PATIENT, port=gateway.port)

    def restart_front(self, i: int) -> None:
        """Shut a fleet gateway down, and start another one at its address. The old gateway's client stays in use."""
        old = self.fronts[i]
        old.process.terminate()
        assert old.process.wait(60) in (0, -15)
        self.fronts[i] = self.front(old.port)
        self.gone.append(old)

    def front(self, port: int = 0, wait: bool = True) -> Gateway:
        named = ",".join(gateway.url for gateway in self.gateways)
        return Gateway(self.nodes[0], "--nodes", named, "--node-seconds", "10", port=port, wait=wait)


@contextmanager
def closing_at_end(node: Node) -> Iterator[Node]:
    """A node that its user starts."""
    try:
        yield node
    finally:
        node.__exit__()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        # Nothing stays in the pools: what is reused comes from the daemons, also after a restart.
        made = [Node(arena_bytes="64MiB", pool_bytes="32MiB", worker_flags={"resident_sequences": 0}) for _ in range(2)]
        nodes = [stack.enter_context(closing_at_end(node)) for node in made]
        for node in nodes:
            node.start_daemon(wait=False)
            node.start_worker(0, wait=False)
        for node in nodes:
            node.wait_daemon()
            node.wait_worker(0)
        gateways = [of_node(node, *PATIENT, wait=False) for node in nodes]
        found = Fleet(nodes, gateways, [])
        found.fronts = [found.front(wait=False) for _ in range(2)]
        for gateway in (*gateways, *found.fronts):
            gateway.wait()
        yield found
        for gateway in (*found.fronts, *found.gateways, *found.gone):
            gateway.close()


def talk(about: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{about} is what this is about: " + f"I read that {about} is old. " * 12}]


def ask(gateway: Gateway, messages: list[dict[str, str]], **options: Any) -> Any:
    given = {"max_tokens": MOST_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}} | options
    return gateway.client.chat.completions.create(model="demo", messages=messages, **given)  # type: ignore[call-overload]


def next_turn(messages: list[dict[str, str]], answer: Any) -> list[dict[str, str]]:
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    return [*messages, said, {"role": "user", "content": "and what else?"}]


def test_the_next_turn_goes_to_the_node_that_is_warm_whichever_gateway_has_it(fleet: Fleet) -> None:
    for i, about in enumerate(("Rome", "the sea", "bread", "chess")):
        first = talk(about)
        answer = ask(fleet.gateways[i % 2], first)  # at the node, behind the fleet's back
        fleet.nodes[i % 2].settle()
        before = fleet.served()
        second = ask(fleet.fronts[i // 2], next_turn(first, answer))
        after = fleet.served()
        assert [b - a for a, b in zip(before, after, strict=True)] == [1 - i % 2, i % 2], about
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached >= answer.usage.prompt_tokens - 8


def test_the_answer_of_a_node_without_workers_comes_from_the_other_at_once(fleet: Fleet) -> None:
    """The node's gateway waits for no worker, because the fleet's tells it that another node is up."""
    messages, options = talk("a ship"), {"max_tokens": 200}
    expected = ask(fleet.gateways[1], messages, **options).choices[0].message.content
    fleet.nodes[1].settle()
    deadline = time.monotonic() + 60
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(ask, fleet.fronts[0], messages, **options)
        while not fleet.nodes[1].client().stats().running:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        fleet.nodes[1].kill("worker-0")
        assert answer.result(60).choices[0].message.content == expected
    fleet.nodes[1].start_worker(0)


def test_what_a_node_keeps_is_reached_through_every_gateway_of_the_fleet(fleet: Fleet) -> None:
    first, second = (front.client for front in fleet.fronts)
    talks = [first.conversations.create(items=[{"role": "user", "content": f"I am {name}"}]) for name in ("Ada", "Bo")]
    for conversation, before in zip(talks, (1, 1), strict=True):
        answer = second.responses.create(
            model="demo", input="who am I?", conversation=conversation.id, max_output_tokens=4
        )
        items = list(first.conversations.items.list(conversation.id, order="asc"))
        assert len(items) == before + 1 + len(answer.output)
        assert first.conversations.items.retrieve(items[0].id, conversation_id=conversation.id).id == items[0].id
        assert [item.type for item in second.responses.input_items.list(answer.id)] == ["message"]
        with pytest.raises(openai.BadRequestError, match="ynchronous"):
            first.responses.cancel(answer.id)
        counted = first.responses.input_tokens.count(input="who am I?", conversation=conversation.id)
        alone = first.responses.input_tokens.count(input="who am I?")
        assert counted.input_tokens > alone.input_tokens
        second.conversations.delete(conversation.id)
        with pytest.raises(openai.NotFoundError, match="conversation"):
            first.conversations.retrieve(conversation.id)
    for path in ("conversations/conv_a%2Fb", "responses/..%2Fmodels/input_items"):
        assert httpx.get(f"{fleet.fronts[0].url}/v1/{path}").status_code == 404
    assert "tokenizer_class" in httpx.get(f"{fleet.fronts[0].url}/tokenizer_info").json()


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_fleets_log_has_what_the_nodes_log_has_and_the_node(fleet: Fleet, path: str, stream: bool) -> None:
    text, name = "the heron waits " * 9, f"fleet-{path.replace('/', '-')}-{stream}"
    body: dict[str, Any] = {"model": "demo", "stream": stream}
    body |= {
        "completions": {"prompt": text, "max_tokens": 5},
        "responses": {"input": text, "max_output_tokens": 5},
    }.get(path, {"messages": [{"role": "user", "content": text}], "max_tokens": 5})
    sent = httpx.post(
        f"{fleet.fronts[0].url}/v1/{path}", json=body, headers={"X-Request-Id": name}, timeout=60
    )  # fmt: skip
    assert sent.status_code == 200
    assert "kvsidecar-summary" not in sent.text + str(sent.headers).lower()
    line, deadline = None, time.monotonic() + 60
    while line is None:
        said = [json.loads(line) for line in fleet.nodes[0].wait_for_log(name)]
        # The node that answered logs the same id, and may be this one.
        line = next((one for one in said if "node" in one), None)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert line["node"] in [gateway.url for gateway in fleet.gateways]
    assert (line["model"], line["tries"], line["status"]) == ("demo", 1, 200)
    assert line["id"]
    assert line["prompt_tokens"] > line["cached_tokens"] >= 0
    assert line["generated_tokens"] in range(1, 6)
    assert 0 < line["ttft_ms"] <= line["ms"]


def test_warming_and_listing_go_through(fleet: Fleet) -> None:
    url = f"{fleet.fronts[0].url}/kvsidecar/v1/warm"
    text = "a text that is to be read before anybody asks. " * 10
    found = httpx.post(url, json={"prompt": text}, timeout=60).json()
    assert found["stored_tokens"] >= found["prompt_tokens"] - 1 > 50
    again = httpx.post(url, json={"prompt": text}, timeout=60).json()
    assert again["cached_tokens"] >= found["prompt_tokens"] - 1, "the same node was asked"
    late = httpx.post(url, json={"prompt": text * 4, "within_seconds": 0.001}, timeout=60)
    assert late.status_code == 504
    both = httpx.post(url, json={"prompt": text, "messages": []}, timeout=60)
    assert (both.status_code, httpx.post(url, json={}, timeout=60).status_code) == (200, 400)
    assert [m.id for m in fleet.fronts[1].client.models.list()] == ["demo"]


def test_a_session_that_ends_at_the_fleet_ends_at_each_node(fleet: Fleet) -> None:
    before = [node.cache_stats().chunks for node in fleet.nodes]
    hints = {"cache_session": "an agent", "ignore_eos": True}
    for gateway, node in zip(fleet.gateways, fleet.nodes, strict=True):
        ask(gateway, talk("a session"), extra_body=hints)
        node.settle()
    stored = [node.cache_stats().chunks for node in fleet.nodes]
    assert all(now > then for now, then in zip(stored, before, strict=True))
    url = f"{fleet.fronts[0].url}/kvsidecar/v1"
    answer = httpx.post(f"{url}/release", json={"cache_session": "an agent"}, timeout=60)
    assert answer.json() == {"released_chunks": sum(stored) - sum(before)}
    assert [node.cache_stats().chunks for node in fleet.nodes] == before
    unnamed = httpx.post(f"{url}/release", json={}, timeout=60)
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "cache_session")
    assert httpx.get(f"{url}/serving").json()["workers"] == 2


def test_a_pin_is_made_where_the_prompt_is_and_ended_from_anywhere(fleet: Fleet) -> None:
    text = "a text that somebody wants to keep for ever. " * 12
    warmed = fleet.gateways[1].post("/kvsidecar/v1/warm", prompt=text)
    fleet.nodes[1].settle()
    found = fleet.fronts[0].post("/kvsidecar/v1/pin", prompt=text)
    assert found["cached_tokens"] >= warmed["stored_tokens"] - 16
    assert [bool(node.cache_stats().pinned_bytes) for node in fleet.nodes] == [False, True]
    ended = fleet.fronts[1].post("/kvsidecar/v1/unpin", pin=found["pin"])
    assert ended == {"unpinned_chunks": found["pinned_chunks"]}
    assert not any(node.cache_stats().pinned_bytes for node in fleet.nodes)
    unknown = httpx.post(f"{fleet.fronts[0].url}/kvsidecar/v1/unpin", json={"pin": found["pin"]}, timeout=60)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "chunk_not_found")


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_a_rolling_restart_loses_nothing_and_what_was_read_is_still_known(fleet: Fleet, rounds: int) -> None:
    talks = [talk(about) for about in ("wood", "stone", "iron", "glass", "paper", "wool")]

    def shares() -> list[float]:
        usages = [ask(fleet.fronts[i % 2], messages).usage for i, messages in enumerate(talks)]
        return [usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens for usage in usages]

    shares()
    for node in fleet.nodes:
        node.settle()
    before, stop = shares(), threading.Event()

    def load(i: int) -> int:
        done = 0
        while not stop.is_set():
            messages = talks[done % len(talks)]
            try:
                ask(fleet.fronts[i % 2], messages)
            except openai.APIConnectionError:  # it is not there: who balances load asks the other one
                ask(fleet.fronts[(i + 1) % 2], messages)
            done += 1
        return done

    with ThreadPoolExecutor(3) as clients:
        running = [clients.submit(load, i) for i in range(3)]
        try:
            for _ in range(rounds):
                for i in range(2):
                    fleet.restart(i)
                    fleet.restart_front(i)
        finally:
            stop.set()
        assert all(client.result(60) > 2 for client in running), "an answer that is lost raises here"
    for node in fleet.nodes:
        node.settle()
    assert sum(shares()) >= 0.95 * sum(before) > 0


# ---- reasons of misses ------------------------------------------------------------------------------------------


def why(front: Gateway, name: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{front.url}/kvsidecar/v1/requests/{name}", headers=headers)


def test_a_reason_comes_from_the_node_that_answered(fleet: Fleet) -> None:
    front, body = fleet.fronts[0], {"model": "demo", "prompt": "a prompt that no node has seen " * 8, "max_tokens": 1}
    headers = {"X-Request-Id": "through-the-fleet", "X-KVSidecar-Explain": "true"}
    answer = httpx.post(f"{front.url}/v1/completions", json=body, headers=headers)
    kind, position, _ = answer.headers["X-KVSidecar-Miss"].split("; ")
    assert kind == "never_seen"
    assert position.startswith("position=")
    for name in (answer.json()["id"], "through-the-fleet"):
        assert why(front, name).json()["miss"]["kind"] == "never_seen"
    done = CliRunner().invoke(app, ["why", "--url", front.url, answer.json()["id"]])
    # The position depends on the first tokens of earlier tests' texts.
    assert f"reason: never_seen, at token {position.removeprefix('position=')}\n" in done.stdout
    assert why(front, "no-such-id").status_code == 404


def test_a_guest_of_the_fleet_is_no_operator_at_its_nodes(fleet: Fleet) -> None:
    """To the nodes, the fleet's gateway is an operator, because it is a process of their own user."""
    named = ",".join(gateway.url for gateway in fleet.gateways)
    front = Gateway(fleet.nodes[0], "--nodes", named, "--api-key", "guest", "--operator-key", "chief")
    try:
        guest, chief = ({"Authorization": f"Bearer {key}"} for key in ("guest", "chief"))
        body = {"model": "demo", "prompt": "a secret " * 20, "max_tokens": 1, "cache_salt": "one"}
        name = httpx.post(f"{front.url}/v1/completions", json=body, headers=guest).json()["id"]
        assert why(front, name, **guest).status_code == 404
        assert why(front, name, **guest, **{"X-Cache-Salt": "one"}).status_code == 200
        assert why(front, name, **chief).status_code == 200
        across = {"X-KVSidecar-Explain": "across-tenants"}
        for key, status in ((guest, 403), (chief, 200)):
            answer = httpx.post(f"{front.url}/v1/completions", json=body, headers=key | across)
            assert answer.status_code == status, answer.text
    finally:
        front.close()
