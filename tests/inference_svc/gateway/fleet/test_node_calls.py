"""Calls to one node of a fleet: the node that keeps a response."""

from __future__ import annotations

import pytest

from inference_svc.gateway.fleet import prefix_query
from tests.inference_svc.gateway.fleet.peers import Peer, fleet_of


async def test_a_response_of_a_node_that_answers_late_is_not_unknown() -> None:
    """Clients do not repeat a request after 400 or 404."""
    late, other = Peer(responses=frozenset({"resp_1"})), Peer()
    async with fleet_of(late, other, node_seconds=60) as (client, fleet):
        late.silent = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefix_query, "_TIMEOUT_SECONDS", 0.1)
            read = await client.get("/v1/responses/resp_1")
            deleted = await client.delete("/v1/responses/resp_1")
            continued = await client.post("/v1/responses", json={"input": "", "previous_response_id": "resp_1"})
        assert [answer.status_code for answer in (read, deleted, continued)] == [503] * 3
        assert "try again in a moment" in continued.json()["error"]["message"]
        assert not other.prompts
        late.silent = False
        assert (await client.get("/v1/responses/resp_1")).json() == {"id": "resp_1"}
        assert len(fleet.discovery.alive) == 2
