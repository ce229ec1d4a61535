"""The page's files and what its endpoint tells, without a browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.net.channel import aio_channel

import inference_svc.gateway
from benchmarks.node import Node
from inference_svc.gateway import tenant_usage
from inference_svc.gateway.hit_ratio_history import STEP_SECONDS, HitRatioHistory
from inference_svc.gateway.node_view import NodeView
from inference_svc.gateway.tenant_usage import TenantCounts
from inference_svc.gateway.worker_router import WorkerRouter
from tests.inference_svc.gateway.conftest import Gateway, of_node

FOLDER = Path(inference_svc.gateway.__file__).parent / "page"
NODE = "/kvsidecar/v1/node"


def ask(url: str, salt: str = "", key: str = "", words: int = 60) -> None:
    body = {"messages": [{"role": "user", "content": "hello " * words}], "max_tokens": 1, "cache_salt": salt}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30).status_code == 200


def test_files_come_with_their_types_and_only_from_here(gateway: Gateway) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for path in FOLDER.iterdir():
        found = httpx.get(f"{gateway.url}/page/{path.name}")
        assert found.content == path.read_bytes()
        assert found.headers["content-type"].startswith(kinds[path.suffix])
        assert found.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in found.headers["content-security-policy"]
        assert found.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org)", path.read_text())
    assert httpx.get(f"{gateway.url}/").content == (FOLDER / "index.html").read_bytes()
    assert httpx.head(f"{gateway.url}/").status_code == 200


def test_a_file_that_is_known_is_not_sent_again(gateway: Gateway) -> None:
    tag = httpx.get(f"{gateway.url}/page/app.js").headers["etag"]
    known = httpx.get(f"{gateway.url}/page/app.js", headers={"If-None-Match": f'"other", W/{tag}'})
    assert (known.status_code, known.content) == (304, b"")
    assert httpx.get(f"{gateway.url}/page/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


_OUTSIDE = ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "..%5capp.py", "/etc/passwd", "", "app.py"]


@pytest.mark.parametrize("path", _OUTSIDE)
def test_nothing_else_is_a_file_of_the_page(gateway: Gateway, path: str) -> None:
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"))
    try:
        connection.request("GET", f"/page/{path}")  # sent as it stands; httpx would tidy it up
        found = connection.getresponse()
        assert found.status == 404
        assert json.loads(found.read())["error"]["code"] == "not_found"
    finally:
        connection.close()


def test_the_node_is_shown_to_who_asks_on_this_machine(gateway: Gateway) -> None:
    ask(gateway.url, salt="salt-of-mine")
    found = httpx.get(f"{gateway.url}{NODE}", headers={"X-Cache-Salt": "salt-of-mine"})
    shown = found.json()
    assert shown["operator"] is True
    assert [w["state"] for w in shown["workers"]] == ["ready", "ready"]
    assert [t["name"] for t in shown["cache"]["tiers"]] == ["arena", "disk"]
    assert "salt-of-mine" not in found.text
    for headers in ({"X-Forwarded-For": "203.0.113.7"}, {"Host": "203.0.113.7"}):
        assert httpx.get(f"{gateway.url}{NODE}", headers=headers).json()["operator"] is False


def shown(locked: Gateway, key: str, salt: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "X-Cache-Salt": salt}
    found: dict[str, Any] = httpx.get(f"{locked.url}{NODE}", headers=headers).json()
    return found


def test_guests_see_their_own_and_operators_all(two: Node, locked: Gateway) -> None:
    assert httpx.get(f"{locked.url}{NODE}").status_code == 401
    assert httpx.get(f"{locked.url}/").status_code == 200
    assert httpx.get(f"{locked.url}/page/app.js").status_code == 200
    for salt in ("crimson", "blüe"):
        ask(locked.url, salt, key="guest", words=1500)  # the operator sees the largest tenants of the node
    two.settle()
    mine = shown(locked, "guest", "bl%C3%BCe")
    assert mine["operator"] is False
    assert [(t["name"], t["chunks"] > 0) for t in mine["cache"]["tenants"]] == [("yours", True)]
    assert not {"tiers", "calls", "evictions"} & set(mine["cache"])
    assert all(set(w) <= {"name", "state", "model", "busy", "reuse_anywhere"} for w in mine["workers"])
    assert shown(locked, "guest", "nobody")["cache"]["tenants"][0]["chunks"] == 0
    everything = shown(locked, "chief")
    tenants = {t["tenant"]: t for t in everything["cache"]["tenants"]}
    assert mine["cache"]["tenants"][0]["tenant"] in tenants
    assert len(tenants) >= 2
    assert everything["cache"]["calls"]
    assert "crimson" not in json.dumps(everything)


def test_the_daemon_counts_once_for_all_tabs_of_a_guest(two: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through all of a tenant's chunks to count them."""
    asked: list[bytes] = []

    class Daemon(CacheServiceStub):
        def __init__(self, channel: grpc.aio.Channel) -> None:
            super().__init__(channel)
            stats = self.Stats

            async def noted(request: cache_pb2.StatsRequest, timeout: float) -> cache_pb2.StatsResponse:
                asked.append(request.tenant_salt)
                return await stats(request, timeout=timeout)

            self.Stats = noted

    async def look() -> None:
        router = WorkerRouter([str(two.worker_socket(i)) for i in range(2)])
        view = NodeView(router, two.cache_socket)
        await router.start()
        await view.start()
        try:
            tabs = await asyncio.gather(*(view.show(b"umber", False) for _ in range(8)))
            again = await view.show(b"umber", False)
            assert asked == [b"umber"]
            assert again["cache"]["tenants"][0]["name"] == "yours"
            assert all(tab["cache"] == again["cache"] for tab in tabs)
            await asyncio.gather(view.show(b"ochre", False), view.show(b"", False))
            assert sorted(asked) == [b"", b"ochre", b"umber"]  # nobody is answered with another's
        finally:
            await view.close()
            await router.close()

    monkeypatch.setattr("inference_svc.gateway.node_view.CacheServiceStub", Daemon)
    asyncio.run(look())


def test_guests_of_many_salts_take_no_more_memory(two: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_usage, "_COUNT_SECONDS", 60)

    async def look() -> int:
        counts = TenantCounts()
        async with aio_channel(two.cache_socket) as channel:
            daemon = CacheServiceStub(channel)
            found = await asyncio.gather(*(counts.count(daemon, bytes(32), b"%d" % i) for i in range(300)))
        assert [one.chunks for one in found] == [0] * 300
        return len(counts)

    assert asyncio.run(look()) == 256


def test_the_page_can_be_left_out(two: Node) -> None:
    bare = of_node(two, "--page", "false", "--cache-socket", "none")
    try:
        assert httpx.get(f"{bare.url}/").status_code == 404
        assert httpx.get(f"{bare.url}/page/app.js").status_code == 404
        assert "was not told" in httpx.get(f"{bare.url}{NODE}").json()["cache"]["failing"]
    finally:
        bare.close()


def test_history_counts_what_counters_rose_by() -> None:
    history = HitRatioHistory()
    history.observe("a", pb.GetStatsResponse(prompt_tokens=1000, cached_tokens=900), 0.0)  # before these minutes
    history.observe("a", pb.GetStatsResponse(prompt_tokens=1100, cached_tokens=950), 1.0)
    history.observe("a", pb.GetStatsResponse(prompt_tokens=20, cached_tokens=5), 3 * STEP_SECONDS)  # started again
    assert history.as_dict()["prompt_tokens"] == [100, 0, 0, 20]
    assert history.as_dict()["cached_tokens"] == [50, 0, 0, 5]
    history.observe("a", pb.GetStatsResponse(prompt_tokens=21, cached_tokens=5), 1e6)
    assert len(history.as_dict()["prompt_tokens"]) == 120
    assert sum(history.as_dict()["prompt_tokens"]) == 1
