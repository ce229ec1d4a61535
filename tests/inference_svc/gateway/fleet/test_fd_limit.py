"""Connections of a fleet's gateway, and the descriptor limit that allows them."""

from __future__ import annotations

import asyncio
import resource

import pytest

from inference_svc.gateway.fleet import prefix_query
from tests.inference_svc.gateway.fleet.peers import Peer, fleet_of
from tests.inference_svc.gateway.http_server import gateway_process

LONG = "tell me what you know of the sea. " * 20


def test_a_gateway_may_have_more_than_its_shell_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with gateway_process("256:", "--nodes", "http://127.0.0.1:1") as (gateway, _):
        soft, _ = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
        assert soft == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))


async def test_no_more_are_asked_at_one_time_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_query, "_MAX_CONCURRENT_QUERIES", 3)
    now = peak = 0

    class Slow(Peer):
        async def _serve(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
            nonlocal now, peak
            asked = path.startswith("/kvsidecar/v1/held/")
            now += asked
            peak = max(peak, now)
            if asked:
                await asyncio.sleep(0.01)
            now -= asked
            await super()._serve(path, body, writer)

    async with fleet_of(Slow(), Slow()) as (client, _):
        body = {"model": "m", "prompt": LONG}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body, timeout=30) for _ in range(12)))
        assert {answer.status_code for answer in answers} == {200}
        said = [client.get(f"/v1/responses/resp_{i}") for i in range(12)]
        assert {answer.status_code for answer in await asyncio.gather(*said)} == {404}
    assert peak == 3
