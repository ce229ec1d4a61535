"""Calls to one node of a fleet: kept responses, and the client's headers."""

from __future__ import annotations

import asyncio

import pytest

from inference_svc.gateway.fleet import prefix_query
from tests.inference_svc.gateway.fleet.peers import Peer, fleet_of, says


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


@pytest.mark.parametrize("name", ["x-request-id", "x-cache-salt"])
@pytest.mark.parametrize("value", ["é".encode(), "é".encode("latin-1")])
async def test_a_header_beyond_ascii_reaches_the_node_as_it_was_sent(name: str, value: bytes) -> None:
    received = list[bytes]()

    class Reading(Peer):
        async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            received.extend(line.partition(b": ")[2] for line in lines if line.lower().startswith(name.encode()))
            await says(self.served)(writer)
            writer.close()

    async with fleet_of(Reading()) as (client, _):
        headers = [(name.encode(), value)]
        for path in ("/v1/completions", "/v1/conversations"):
            answer = await client.post(path, json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 200, answer.text
    assert received == [value] * 2
