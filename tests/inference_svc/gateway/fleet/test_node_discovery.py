"""Health of a fleet's nodes: a poll decides it, not the refusal of one request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from benchmarks.condition_wait import until_async
from tests.inference_svc.gateway.fleet.peers import SERVED, Handler, Peer, fleet_of, says

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "tell me what you know of the sea. " * 20}]}
LOST = says({"error": {"message": "no inference worker is up"}}, 503)
NO_WORKER: dict[str, Any] = SERVED | {"models": [], "workers": 0}


async def ask(client: httpx.AsyncClient) -> Any:
    return (await client.post(CHAT, json=BODY, timeout=20)).json()


@pytest.mark.parametrize("refusal", [LOST, says({"error": {"message": "the upstream is away"}}, 502)])
async def test_a_node_that_refuses_one_request_stays_up(refusal: Handler) -> None:
    warm, other = Peer(held_tokens=900, answer=refusal), Peer()
    async with fleet_of(warm, other, node_seconds=60) as (client, fleet):
        assert await ask(client) == {"from": other.url}
        assert [node.why for node in fleet.discovery.all] == ["it has not answered yet"] * 2, "a node was down"
        assert len(fleet.discovery.alive) == 2
        warm.answer = None
        assert await ask(client) == {"from": warm.url}


async def test_a_node_that_refuses_a_request_is_polled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.gateway.fleet.node_discovery._POLL_SECONDS", 3600.0)
    warm, other = Peer(held_tokens=900, answer=LOST), Peer()
    async with fleet_of(warm, other, node_seconds=60) as (client, fleet):
        warm.served = NO_WORKER
        assert await ask(client) == {"from": other.url}
        await until_async(lambda: not fleet.discovery.all[0].alive)
        assert fleet.discovery.all[0].why == "none of its workers is up"
        assert await ask(client) == {"from": other.url}
    assert len(warm.prompts) == 1
