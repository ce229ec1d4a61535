"""Settings of the gateway in a node: its own variables, below the node's settings."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node import free_port
from cache_daemon.store import shutdown
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.node.restarting_process import STOP_SECONDS
from inference_svc.node.supervisor import ServeConfig, Supervisor
from inference_svc.server.worker_config import WorkerConfig


def test_the_gateways_address_is_the_nodes_or_else_its_own(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSIDECAR_PORT")
    own, nodes, flag = free_port(), free_port(), free_port()
    monkeypatch.setenv("KVSIDECAR_GATEWAY_HOST", "0.0.0.0")
    monkeypatch.setenv("KVSIDECAR_GATEWAY_PORT", str(own))
    assert {"--host=0.0.0.0", f"--port={own}"} <= set(children("demo")[-1])
    monkeypatch.setenv("KVSIDECAR_PORT", str(nodes))
    assert {"--host=0.0.0.0", f"--port={nodes}"} <= set(children("demo")[-1])
    assert {"--host=127.0.0.1", f"--port={flag}"} <= set(children("demo", "--host=127.0.0.1", f"--port={flag}")[-1])


def test_a_taken_or_open_port_of_the_gateways_variable_is_refused(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSIDECAR_PORT")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("KVSIDECAR_GATEWAY_PORT", str(port))
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in serve("demo")
    monkeypatch.setenv("KVSIDECAR_GATEWAY_PORT", "0")
    assert "the gateway of a node needs a port from 1 to 65535" in serve("demo")


def test_the_supervisor_waits_for_each_process_as_long_as_that_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSIDECAR_GATEWAY_DRAIN_SECONDS", "300")
    monkeypatch.setenv("KVSIDECAR_WORKER_DRAIN_SECONDS", "200")

    async def limits(**given: Any) -> list[float]:
        node = Supervisor(ServeConfig(model="demo", runtime_dir=tmp_path, **given), WorkerConfig(model="demo"))
        node._stop.set()
        return [node._launch(name, ["true"]).stop_seconds - STOP_SECONDS for name in ("gateway", "worker-0")]

    assert asyncio.run(limits()) == [300, 200]
    assert asyncio.run(limits(drain_seconds=7.0))[0] == 7, "the node's setting goes to the gateway as a flag"


def test_the_upgrade_page_gives_stop_the_time_that_a_node_may_drain() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations" / "upgrades.md").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"kvsidecar stop --seconds (\d+)` with the default drain", page)
    gateway, worker = GatewayConfig().drain_seconds, WorkerConfig(model="demo").drain_seconds
    assert float(seconds) >= gateway + worker + shutdown.SECONDS
