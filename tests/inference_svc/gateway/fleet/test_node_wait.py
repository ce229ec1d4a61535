"""A fleet whose nodes have no workers, and start them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from benchmarks.condition_wait import until_async
from tests.inference_svc.gateway.fleet.peers import SERVED, Peer, fleet_of, says

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "tell me what you know of the sea. " * 20}]}
LOST = says({"error": {"message": "no inference worker is up"}}, 503)
STARTING = {"models": [], "workers": 0, "starting": True}
# Below the time that a request waits for nodes that start, which no test waits for.
TIMEOUT_SECONDS = 60.0


async def ask(client: httpx.AsyncClient, prefer: str = "", **more: Any) -> httpx.Response:
    headers = {"Prefer": prefer} if prefer else {}
    return await client.post(CHAT, json=BODY | more, headers=headers, timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("wanted", ["", "wait=7"])
async def test_only_the_last_node_waits_for_its_worker_as_long_as_the_client_wants(wanted: str) -> None:
    warm, other = Peer(held_tokens=900, answer=LOST), Peer()
    async with fleet_of(warm, other) as (client, _):
        assert (await ask(client, wanted)).json() == {"from": other.url}
    assert (warm.preferences, other.preferences) == (["wait=0"], [wanted])


async def test_a_node_that_refused_because_of_another_is_asked_again_when_the_other_vanishes() -> None:
    """With ``wait=0``, a node without workers refuses at once; as the only node, it waits for its worker."""

    async def waits(writer: asyncio.StreamWriter) -> None:
        is_hurried = warm.preferences[-1] == "wait=0"
        await (LOST if is_hurried else says({"from": warm.url}))(writer)

    async def vanishes(_: asyncio.StreamWriter) -> None:
        other.served_code = 503

    warm, other = Peer(held_tokens=900, answer=waits), Peer(answer=vanishes)
    async with fleet_of(warm, other) as (client, _):
        assert (await ask(client)).json() == {"from": warm.url}
    assert warm.preferences == ["wait=0", ""]


@pytest.mark.parametrize("seen", [False, True])
async def test_requests_wait_for_nodes_that_start_their_workers(seen: bool) -> None:
    peers = [Peer(served=dict(SERVED if seen else STARTING)) for _ in range(2)]
    async with fleet_of(*peers) as (client, fleet):
        for peer in peers:
            peer.served = dict(STARTING)
        await until_async(lambda: not fleet.discovery.alive and all(node.starting for node in fleet.discovery.all))
        waiting = asyncio.create_task(ask(client))
        await until_async(lambda: fleet._proxy._wait._num_waiting)
        assert (await ask(client, "wait=0")).status_code == 503, "who does not want to wait"
        assert not waiting.done()
        peers[1].served = dict(SERVED)
        assert (await waiting).json() == {"from": peers[1].url}


async def test_requests_wait_until_the_node_notices_its_started_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its polls of the worker may time out first, each after 4 s; the fleet gave up after 3 s."""
    monkeypatch.setattr("inference_svc.gateway.fleet.proxy._NO_NODE_SECONDS", 0.0)
    peer = Peer(served=dict(STARTING))
    async with fleet_of(peer) as (client, fleet):
        waiting = asyncio.create_task(ask(client))
        await until_async(lambda: fleet._proxy._wait._num_waiting)
        peer.served = STARTING | {"starting": False}
        (node,) = fleet.discovery.all
        await until_async(lambda: not node.starting)
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        peer.served = dict(SERVED)
        assert (await waiting).json() == {"from": peer.url}


async def test_nobody_waits_for_nodes_that_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for those that start another model, or for longer than is set."""
    monkeypatch.setattr("inference_svc.gateway.fleet.proxy._NO_NODE_SECONDS", 0.1)
    monkeypatch.setattr("inference_svc.gateway.fleet.proxy.NOTICE_SECONDS", 0.1)
    away, other = Peer(), Peer(served=SERVED | {"models": [{"id": "other"}]})
    async with fleet_of(away, other) as (client, fleet):
        away.served = STARTING | {"starting": False}
        other.served = dict(STARTING)
        await until_async(lambda: not fleet.discovery.alive and fleet.discovery.all[1].starting)
        assert (await ask(client)).status_code == 503
    start = Peer(served=dict(STARTING))
    async with fleet_of(start, worker_start_seconds=0.3) as (client, _):
        assert (await ask(client)).status_code == 503
    assert not away.prompts + other.prompts + start.prompts
