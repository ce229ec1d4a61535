"""Calls about the caches of all nodes, while a node has no workers: its daemon still has chunks and pins."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.condition_wait import until_async
from tests.inference_svc.gateway.fleet.peers import SERVED, Handler, Peer, fleet_of, says

NO_WORKER = SERVED | {"models": [], "workers": 0}
NOT_HERE = says({"error": {"message": "nothing is pinned by this name", "code": "chunk_not_found"}}, 404)
WRONG = says({"error": {"message": "the field is wrong"}}, 400)
RELEASED, UNPINNED = says({"released_chunks": 3}), says({"unpinned_chunks": 2})


async def call(path: str, answer: Handler, model: str = "m") -> httpx.Response:
    """Send a call to a fleet of a live node, which gives this answer, and a node that was up and has no workers."""
    live, away = Peer(answer=answer), Peer()
    async with fleet_of(live, away) as (client, fleet):
        away.served = NO_WORKER
        await until_async(lambda: len(fleet.discovery.alive) == 1)
        sent = await client.post(f"/kvsidecar/v1/{path}", json={"model": model})
    assert len(live.prompts) == 1
    assert not away.prompts
    return sent


@pytest.mark.parametrize("model", ["m", ""])
@pytest.mark.parametrize(("path", "answer"), [("release", RELEASED), ("unpin", NOT_HERE)])
async def test_a_call_is_sent_again_while_a_node_that_may_have_the_chunks_is_down(
    path: str, answer: Handler, model: str
) -> None:
    sent = await call(path, answer, model)
    assert (sent.status_code, sent.json()["error"]["code"]) == (503, "unavailable")


async def test_an_unpin_that_a_node_has_done_is_not_sent_again() -> None:
    sent = await call("unpin", UNPINNED)
    assert (sent.status_code, sent.json()) == (200, {"unpinned_chunks": 2})


async def test_a_wrong_call_is_refused_while_a_node_is_down() -> None:
    assert (await call("release", WRONG)).status_code == 400
