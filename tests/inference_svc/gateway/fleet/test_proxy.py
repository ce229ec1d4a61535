"""Behavior of a fleet's gateway with nodes that refuse, break off, hang, come and go."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from inference_svc.gateway.client_disconnect import ClientDisconnected
from inference_svc.gateway.fleet.prefix_query import to_routed_request
from tests.inference_svc.gateway.fleet.peers import SERVED, Peer, breaks, fleet_of, hangs, named, says, streams

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "tell me what you know of the sea. " * 20}]}
LOST = says({"error": {"message": "no inference worker is up"}}, 503)
LOCKED = says({"error": {"message": "the API key is missing or wrong"}}, 401)
BUSY = says({"error": {"message": "too many requests wait"}}, 429)


async def ask(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post(CHAT, json=BODY | more, timeout=20)


async def test_the_node_that_has_most_of_the_prompt_gets_it_as_it_was_sent() -> None:
    warm, cold = Peer(held_tokens=900), Peer()
    async with fleet_of(cold, warm, node_key="secret") as (client, _):
        assert (await ask(client, seed=3)).json() == {"from": warm.url}
    assert warm.prompts == [BODY | {"seed": 3}]
    assert cold.prompts == []
    assert warm.keys == cold.keys == {"Bearer secret"}


async def test_nobody_is_asked_about_what_is_short_or_not_to_be_reused() -> None:
    warm, cold = Peer(held_tokens=900), Peer()
    async with fleet_of(warm, cold) as (client, _):
        await client.post(CHAT, json={"messages": [{"role": "user", "content": "hello"}]})
        await ask(client, skip_cache=True)
    assert warm.asked == cold.asked == 0
    assert len(warm.prompts) + len(cold.prompts) == 2


@pytest.mark.parametrize(
    "name", ["%2E%2E/serving", "..%2Fserving", "%2E%2E", "x%2F%2E%2E%2F..%2Fserving", "a%3Fb", "a%20b"]
)
async def test_a_path_is_no_answers_id(name: str) -> None:
    """Nodes take the fleet's key for an operator's, so a caller must not choose the path."""
    node = Peer(served=SERVED | {"busy": 7})
    async with fleet_of(node) as (client, _):
        answer = await client.get(f"/kvsidecar/v1/requests/{name}")
    assert answer.status_code == 404
    assert "is no answer's id" in answer.text
    assert not node.prompts


async def test_adapters_are_for_the_nodes_own_gateways() -> None:
    node = Peer()
    async with fleet_of(node) as (client, _):
        for what in ("load", "unload"):
            answer = await client.post(f"/v1/{what}_lora_adapter", json={"lora_name": "law", "lora_path": "law"})
            assert answer.status_code == 400
            assert "send this to the gateway of each node" in answer.json()["error"]["message"]
    assert not node.prompts


@pytest.mark.parametrize("failing", [LOST, breaks, streams(end=False), LOCKED])
async def test_an_answer_of_which_nothing_was_sent_comes_from_another(failing: Any) -> None:
    warm, other = Peer(held_tokens=900, answer=failing), Peer(answer=streams("whole", "[DONE]"))
    async with fleet_of(warm, other) as (client, fleet):
        answer = await ask(client, stream=True)
        assert answer.text == "data: whole\n\ndata: [DONE]\n\n"
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert len(warm.prompts) == len(other.prompts) == 1
        assert all(node.in_flight == 0 for node in fleet.discovery.all)


async def test_a_node_that_has_enough_to_do_stays_up_and_its_word_is_handed_on_when_all_have() -> None:
    warm, other = Peer(held_tokens=900, answer=BUSY), Peer()
    async with fleet_of(warm, other) as (client, fleet):
        assert (await ask(client)).json() == {"from": other.url}
        other.answer = BUSY
        answer = await ask(client)
        assert (answer.status_code, answer.json()["error"]["message"]) == (429, "too many requests wait")
        assert len(fleet.discovery.alive) == 2


async def test_what_was_begun_and_breaks_off_ends_with_an_error() -> None:
    broken = Peer(held_tokens=900, answer=streams("one", "two", end=False))
    async with fleet_of(broken, Peer()) as (client, _):
        *words, error = (await ask(client, stream=True)).text.split("\n\n")[:-1]
    assert [word for word in words if word] == ["data: one", "data: two"]
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the node broke off its answer"


@pytest.mark.parametrize("begun", ['data: {"text": "a', 'data: {"text": "a"}', 'data: {"text": "a"}\n', ": kv"])
async def test_an_event_that_breaks_off_is_not_forwarded(begun: str) -> None:
    broken = Peer(held_tokens=900, answer=streams('{"text": "b"}', begun=begun, end=False))
    async with fleet_of(broken, Peer()) as (client, _):
        *events, end = (await ask(client, stream=True)).text.split("\n\n")
    assert end == ""
    whole, error = (json.loads(event.removeprefix("data: ")) for event in events)
    assert whole == {"text": "b"}
    assert error["error"]["message"] == "the node broke off its answer"


async def test_a_node_that_hangs_is_given_up_and_its_prompts_go_elsewhere() -> None:
    hung, other = Peer(held_tokens=900, answer=hangs), Peer()
    async with fleet_of(hung, other, node_seconds=0.5) as (client, fleet):
        async with asyncio.timeout(60):
            while len(fleet.discovery.alive) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        answer = asyncio.create_task(ask(client))
        await hung.began.wait()
        hung.silent = True
        assert (await answer).json() == {"from": other.url}


async def test_a_stream_that_nobody_wants_any_more_is_ended_at_its_node() -> None:
    """The client disconnects when the node's first bytes arrive."""
    removed, gone = asyncio.Event(), asyncio.Event()

    async def begins(writer: asyncio.StreamWriter) -> None:
        data = b"data: one\n\n"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        await removed.wait()
        event = f"{len(data):x}\r\n".encode() + data + b"\r\n"
        writer.write(head)
        while not writer.transport.is_closing():  # until who reads it has closed
            writer.write(event)
            await asyncio.sleep(0.01)
        gone.set()

    class Going:
        async def is_disconnected(self) -> bool:
            removed.set()
            while not any(task.done() for task in asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return True

    node = Peer(answer=begins)
    async with fleet_of(node) as (_, fleet):
        asked: list[asyncio.Task[Any]] = []
        answer = fleet._proxy._answer

        async def noted(*arguments: Any) -> Any:
            asked.append(asyncio.current_task())  # type: ignore[arg-type]
            return await answer(*arguments)

        fleet._proxy._answer = noted  # type: ignore[method-assign]
        raw = json.dumps(BODY | {"stream": True}).encode()
        with pytest.raises(ClientDisconnected):
            await fleet._proxy.answer(Going(), to_routed_request(CHAT, raw, json.loads(raw)))  # type: ignore[arg-type]
        assert all(one.in_flight == 0 for one in fleet.discovery.all)
        async with asyncio.timeout(20):
            await gone.wait()


async def test_a_refusal_of_the_request_is_handed_on_and_nobody_else_asked() -> None:
    wrong = says({"error": {"message": "temperature is 9", "param": "temperature"}}, 400)
    peers = [Peer(answer=wrong) for _ in range(3)]
    async with fleet_of(*peers) as (client, _):
        answer = await ask(client)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
    assert sum(len(peer.prompts) for peer in peers) == 1


async def test_a_prompt_that_ends_nodes_ends_no_more_than_three() -> None:
    peers = [Peer(answer=breaks) for _ in range(5)]
    async with fleet_of(*peers) as (client, _):
        answer = await ask(client)
    assert answer.status_code == 503
    assert sum(len(peer.prompts) for peer in peers) == 3


async def test_one_that_failed_is_tried_again_when_nobody_else_is_up() -> None:
    alone = Peer(answer=breaks)
    async with fleet_of(alone) as (client, _):
        answer = asyncio.create_task(ask(client))
        await alone.began.wait()
        alone.answer = None
        assert (await answer).json() == {"from": alone.url}


async def test_a_late_answer_is_504() -> None:
    async with fleet_of(Peer(answer=hangs), request_seconds=0.2) as (client, _):
        answer = await ask(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_models_are_found_where_they_are_served() -> None:
    one, other = Peer(), Peer(served=SERVED | {"models": [{"id": "other"}]})
    async with fleet_of(one, other) as (client, _):
        listed = (await client.get("/v1/models")).json()["data"]
        assert {model["id"] for model in listed} == {"m", "other"}
        assert (await client.get("/v1/models/other")).json() == {"id": "other"}
        assert (await ask(client, model="other")).json() == {"from": other.url}
        assert (await client.get("/v1/models/none")).status_code == 404
        unknown = await ask(client, model="none")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


async def test_anthropics_clients_get_models_and_errors_in_their_format() -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with fleet_of(Peer(served=SERVED | {"models": [{"id": "m", "created": 0}]})) as (client, _):
        found = {"type": "model", "id": "m", "display_name": "m", "created_at": "1970-01-01T00:00:00Z"}
        listed = await client.get("/v1/models", headers=version)
        assert listed.json() == {"data": [found], "has_more": False, "first_id": "m", "last_id": "m"}
        assert (await client.get("/v1/models/m", headers=version)).json() == found
        unknown = await client.get("/v1/models/none", headers=version)
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        assert unknown.headers["request-id"] == unknown.json()["request_id"]


async def test_a_response_is_gone_on_from_where_it_is_kept() -> None:
    kept = Peer(responses=frozenset({"resp_1"}))
    async with fleet_of(Peer(held_tokens=900), kept) as (client, _):
        body = {"input": "and then?", "previous_response_id": "resp_1"}
        assert (await client.post("/v1/responses", json=body)).json() == {"from": kept.url}
        assert (await client.get("/v1/responses/resp_1")).json() == {"id": "resp_1"}
        assert (await client.get("/v1/responses/resp_2")).status_code == 404
        kept.answer = breaks
        away = await client.post("/v1/responses", json=body)
    assert (away.status_code, away.json()["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
async def test_a_node_that_keeps_the_items_of_an_input_gets_it(reference: dict[str, str]) -> None:
    """However short the input is and however busy that node: the others refuse the request for good."""
    lost = {"error": {"message": "input refers to the item 'msg_1', which is not kept"}}
    others = [Peer(held=lost, held_code=400) for _ in range(2)]
    kept = Peer(served=SERVED | {"busy": 50})
    async with fleet_of(*others, kept) as (client, _):
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            body = {"model": "m", "input": [reference, {"role": "user", "content": "and?"}]}
            assert (await client.post(path, json=body)).json() == {"from": kept.url}


async def test_a_model_whose_node_is_away_is_not_unknown() -> None:
    other = Peer(served=SERVED | {"models": [{"id": "other", "object": "model"}]})
    async with fleet_of(Peer(), other) as (client, fleet):
        body = {"messages": [], "model": "other"}
        assert (await client.post(CHAT, json=body)).json() == {"from": other.url}
        other.silent = True
        fleet.discovery.all[1].down("it was told to")
        assert (await client.post(CHAT, json=body)).status_code == 503
        assert (await client.post(CHAT, json=body | {"model": "never"})).status_code == 404
        assert (await client.get("/v1/models/")).status_code == 404


async def test_the_last_node_is_waited_for_however_late_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.gateway.fleet.proxy._NO_NODE_SECONDS", 2.0)
    monkeypatch.setattr("inference_svc.gateway.fleet.node_discovery._POLL_SECONDS", 0.1)
    peer = Peer()

    async def breaks_late(writer: asyncio.StreamWriter) -> None:
        peer.answer = None
        await asyncio.sleep(2.2)

    peer.answer = breaks_late
    async with fleet_of(peer) as (client, _):
        assert (await ask(client)).json() == {"from": peer.url}
    assert len(peer.prompts) == 2


async def test_two_ports_of_one_name_are_two_sets_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.gateway.fleet.node_discovery._RESOLVE_SECONDS", 0.01)
    one, two = Peer(), Peer()
    named("nodes.test", monkeypatch)
    nodes = f"dns+http://nodes.test:{one.port},dns+http://nodes.test:{two.port}"
    async with one.listening(), two.listening(), fleet_of(nodes=nodes) as (_, fleet):
        for _ in range(10):
            await asyncio.sleep(0.01)
            assert {node.url for node in fleet.discovery.all} == {one.url, two.url}


async def test_who_is_no_node_or_wants_a_key_is_said() -> None:
    strange, locked = Peer(served={"hello": "world"}), Peer(served_code=401)
    async with fleet_of(strange, locked, operator_key="chief") as (client, _):
        assert (await client.get("/health")).status_code == 503
        assert (await ask(client)).status_code == 503
        assert (await client.get("/kvsidecar/v1/fleet")).status_code == 403
        shown = (await client.get("/kvsidecar/v1/fleet", headers={"Authorization": "Bearer chief"})).json()
    assert {node["why"] for node in shown["nodes"]} == {
        "what answers is no gateway of a node",
        "it answers 401; give its key as KVSIDECAR_GATEWAY_NODE_KEY",
    }
    assert not locked.prompts


@pytest.mark.parametrize(
    ("body", "named"),
    [(b"{", "not JSON"), (b"[]", "must be a JSON object"), (b"x" * 2000, "larger than the 1024 bytes")],
)
async def test_garbage_gets_a_sentence(body: bytes, named: str) -> None:
    async with fleet_of(Peer(), max_body_bytes=1024) as (client, _):
        assert (await client.post(CHAT, json={"model": {"a": 1}, "messages": 5, "prompt": [[]]})).status_code == 200
        answer = await client.post(CHAT, content=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("said", ["OK", [1, 2], {"prompt_tokens": 1, "held_tokens": 1, "busy": float("inf")}], ids=repr)
async def test_a_node_that_talks_nonsense_of_a_prompt_has_nothing_of_it(said: Any) -> None:
    strange, warm = Peer(held=said), Peer(held_tokens=900)
    async with fleet_of(strange, warm) as (client, _):
        assert (await ask(client)).json() == {"from": warm.url}
    assert strange.asked == 1


@pytest.mark.parametrize("more", [{"workers": float("inf")}, {"workers": -1}, {"busy": float("inf")}], ids=repr)
async def test_a_node_that_talks_nonsense_of_itself_is_down_until_it_talks_sense(more: dict[str, Any]) -> None:
    peer = Peer()
    async with fleet_of(peer) as (client, fleet):
        for served, alive in ((SERVED | more, 0), (SERVED, 1)):
            peer.served = served
            async with asyncio.timeout(20):
                while len(fleet.discovery.alive) != alive:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert (await ask(client)).json() == {"from": peer.url}


async def test_a_name_that_no_response_has_is_asked_of_nobody() -> None:
    async with fleet_of(Peer(), Peer()) as (client, _):
        body = {"input": "and then?", "previous_response_id": "a" * 70_000}
        assert (await client.post("/v1/responses", json=body)).status_code == 200  # the node will say that it has none
        assert (await client.get("/v1/responses/" + "a" * 60_000)).status_code == 404


async def test_addresses_of_a_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.gateway.fleet.node_discovery._RESOLVE_SECONDS", 0.02)
    first = Peer()
    second = Peer(host="127.0.0.2", port=first.port)
    addresses = named("nodes.test", monkeypatch)
    nodes = f"dns+http://nodes.test:{first.port}"
    async with first.listening(), second.listening(), fleet_of(nodes=nodes) as (client, fleet):

        async def up(*urls: str) -> None:
            async with asyncio.timeout(60):
                while {node.url for node in fleet.discovery.alive} != set(urls):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        await up(first.url)
        addresses[:] = ["127.0.0.1", "127.0.0.2"]
        await up(first.url, second.url)
        addresses.clear()  # the resolver is away
        await asyncio.sleep(0.1)
        await up(first.url, second.url)
        addresses[:] = ["127.0.0.2"]
        await up(second.url)
        assert (await ask(client)).json() == {"from": second.url}
        async with asyncio.timeout(60):
            while first.url in fleet.discovery._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_session_ends_at_every_node_that_serves_its_model() -> None:
    one, two = Peer(answer=says({"released_chunks": 3})), Peer(answer=says({"released_chunks": 4}))
    other = Peer(served=SERVED | {"models": [{"id": "other"}]}, answer=LOST)
    body = {"model": "m", "cache_session": "agent", "cache_salt": "s"}
    async with fleet_of(one, two, other) as (client, _):
        answer = await client.post("/kvsidecar/v1/release", json=body)
        assert (answer.status_code, answer.json()) == (200, {"released_chunks": 7})
        assert one.prompts == two.prompts == [body]
        assert not other.prompts
        unknown = await client.post("/kvsidecar/v1/release", json=body | {"model": "none"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
        one.answer = two.answer = says(
            {"error": {"message": "cache_session is missing", "param": "cache_session"}}, 400
        )
        wrong = await client.post("/kvsidecar/v1/release", json={"model": "m"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "cache_session")


@pytest.mark.parametrize("failing", [LOST, LOCKED, breaks, says([1]), says({"released_chunks": "many"})])
async def test_a_release_that_did_not_reach_every_node_is_to_be_sent_again(failing: Any) -> None:
    async with fleet_of(Peer(answer=says({"released_chunks": 3})), Peer(answer=failing)) as (client, _):
        answer = await client.post("/kvsidecar/v1/release", json={"cache_session": "agent"})
    assert answer.status_code == 503
    assert "a node of the fleet" in answer.json()["error"]["message"]


async def test_a_fleet_tells_routers_its_load_and_its_longest_prefix_as_a_node_does() -> None:
    warm, cold = Peer(held_tokens=900, served=SERVED | {"busy": 2}), Peer()
    down = Peer(served={"hello": "world"})
    async with fleet_of(cold, warm, down) as (client, _):
        shown = (await client.get("/kvsidecar/v1/serving")).json()
        assert shown == {"models": SERVED["models"], "workers": 2, "starting": False, "busy": 2}
        found = (await client.post("/kvsidecar/v1/held/v1/chat/completions", json=BODY)).json()
        assert (found["prompt_tokens"], found["held_tokens"]) == (1000, 900)
        assert (await client.post("/kvsidecar/v1/held/v1/models", json=BODY)).status_code == 404
    async with fleet_of(warm, api_key="guest") as (client, _):
        shown = (await client.get("/kvsidecar/v1/serving", headers={"Authorization": "Bearer guest"})).json()
        assert "busy" not in shown
