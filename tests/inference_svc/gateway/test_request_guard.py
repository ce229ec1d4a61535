"""What requests are told by their keys, and what becomes of those without: nothing, in traces either."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from kvsidecar.telemetry.tracer import NOOP_SPAN, Attributes, Span, Tracer

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.routes import create_app


class Noting(Tracer):
    """Records the started work."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def serve(self, name: str, sent: Iterable[tuple[str, str | bytes]], attributes: Attributes) -> Span:
        self.begun.append(name)
        return NOOP_SPAN


async def test_callers_without_the_key_make_no_spans() -> None:
    tracer = Noting()
    app = create_app(GatewayConfig(workers="127.0.0.1:1", cache_socket=None, api_key="right"), tracer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for key, code in (("wrong", 401), ("", 401), ("right", 400)):
            answer = await client.post("/v1/completions", json=[], headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == code, answer.text
    assert tracer.begun == ["POST /v1/completions"]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Authorization": "bearer right"}, 200),
        ({"Authorization": "BEARER  right"}, 200),
        ({"Authorization": "bearer RIGHT"}, 401),
        ({"Authorization": "basic right"}, 401),
        ({"Authorization": "bearer wrong", "x-api-key": "right"}, 401),
        ({"Authorization": "bearer", "x-api-key": "right"}, 200),
    ],
)
async def test_the_scheme_of_a_key_may_have_any_case(headers: dict[str, str], code: int) -> None:
    """RFC 9110, 11.1 and 11.4: the scheme ignores case, and one or more spaces separate it from the token."""
    app = create_app(GatewayConfig(workers="127.0.0.1:1", cache_socket=None, api_key="right"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get("/kvsidecar/v1/serving", headers=headers)
    assert answer.status_code == code, answer.text


@pytest.mark.parametrize(
    ("keys", "key", "told"),
    [
        ({}, "", True),
        ({"api_key": "guests"}, "guests", False),
        ({"api_key": "guests", "operator_key": "mine"}, "guests", False),
        ({"api_key": "guests", "operator_key": "mine"}, "mine", True),
        ({"operator_key": "mine"}, "", False),
    ],
)
async def test_how_busy_a_node_is_tells_of_others(keys: dict[str, Any], key: str, told: bool) -> None:
    app = create_app(GatewayConfig(workers="127.0.0.1:1", cache_socket=None, **keys))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get("/kvsidecar/v1/serving", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    assert answer.json() == {"models": [], "workers": 0, "starting": False} | ({"busy": 0} if told else {})


async def test_unknown_paths_share_one_label() -> None:
    """Else a caller could create a time series with each request."""
    app = create_app(GatewayConfig(workers="127.0.0.1:1", cache_socket=None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for number in range(2):
            assert (await client.get(f"/nowhere/{number}")).status_code == 404
        metrics = (await client.get("/metrics")).text
    assert "nowhere" not in metrics
    assert re.search(r'requests_total\{[^}]*path="other"[^}]*\} 2\.0', metrics), metrics


async def test_an_error_of_the_server_is_told_as_such() -> None:
    """Clients retry a server_error."""
    app = create_app(GatewayConfig(workers="127.0.0.1:1", cache_socket=None, worker_wait_seconds=0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": "hello"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert answer.headers["retry-after"] == "1"
