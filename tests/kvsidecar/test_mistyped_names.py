"""Names that are mistyped, and addresses that are paths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kvsidecar import AsyncClient, Client
from kvsidecar.cli.service_settings import ServiceSettings, read_settings
from kvsidecar.errors import ConfigurationError
from kvsidecar.net.addresses import socket_path
from kvsidecar.worker_targets import target_of

from cache_daemon.config import DaemonConfig
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.node.supervisor import ServeConfig
from inference_svc.server.worker_config import WorkerConfig


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_an_unknown_option_names_the_method_and_a_near_one(method: str) -> None:
    near = rf"^{method}\(\) got an unexpected keyword argument 'max_token'; did you mean 'max_tokens'\?$"
    mistyped: Any = {"max_token": 4}

    def call() -> None:
        with Client("127.0.0.1:1") as client:
            next(getattr(client, method)("x", **mistyped))

    async def ask() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            answer = getattr(client, method)("x", **mistyped)
            await (answer if method == "generate" else anext(answer))

    with pytest.raises(TypeError, match=near):
        call()
    with pytest.raises(TypeError, match=near):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("name", "hint"),
    [("KVSIDECAR_PROT", " (did you mean KVSIDECAR_PORT?)"), ("KVSIDECAR_FOO", ""), ("KVSIDECAR_APIKEY", "")],
)
def test_an_unknown_variable_names_a_near_one_by_what_is_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigurationError) as raised:
        read_settings(ServeConfig, {}, None)
    assert str(raised.value) == f"{name} is in the environment and is no setting{hint}; unset it, or see --help"


@pytest.mark.parametrize("name", ["KVSIDECAR_API_KEY", "KVSIDECAR_BENCH_VLLM", "KVSIDECAR_CACHE_STAGING_DIR"])
def test_variables_of_commands_may_be_exported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    for settings in (ServeConfig, DaemonConfig):
        read_settings(settings, {}, None)


@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
@pytest.mark.parametrize(
    ("name", "settings", "setting"),
    [
        ("KVSIDECAR_PORT", ServeConfig, "port"),
        ("KVSIDECAR_FLEET_PORT", ServeConfig, ""),
        ("KVSIDECAR_GATEWAY_PORT", GatewayConfig, "port"),
        ("KVSIDECAR_GATEWAY_MAIN_PORT", GatewayConfig, ""),
        ("KVSIDECAR_CACHE_METRICS_PORT", DaemonConfig, "metrics_port"),
    ],
)
def test_the_link_of_a_kubernetes_service_is_neither_a_setting_nor_a_mistake(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: type[ServiceSettings], setting: str, protocol: str
) -> None:
    """The kubelet sets NAME_PORT=tcp://IP:PORT and NAME_PORT_80_TCP for every Service of the namespace."""
    expected = read_settings(settings, {}, None)
    monkeypatch.setenv(name, f"{protocol}://10.0.0.1:80")
    monkeypatch.setenv(f"{name}_80_{protocol.upper()}", f"{protocol}://10.0.0.1:80")
    assert read_settings(settings, {}, None) == expected
    assert settings() == expected
    monkeypatch.setenv(name, "8123")
    if setting:
        assert getattr(read_settings(settings, {}, None), setting) == 8123
    else:
        with pytest.raises(ConfigurationError, match=f"{name} is in the environment and is no setting"):
            read_settings(settings, {}, None)


@pytest.mark.parametrize("text", ["w.sock", "run/w.sock", "./w.sock", "unix:run/w.sock", "/run/w.sock"])
def test_what_has_no_port_is_a_path(text: str) -> None:
    path = Path(text.removeprefix("unix:"))
    assert socket_path(text) == path
    assert target_of(text) == f"unix:{path.absolute()}"


@pytest.mark.parametrize("text", ["localhost:7400", "[::1]:7400", "dns:///name:7400"])
def test_what_has_one_is_none(text: str) -> None:
    assert socket_path(text) is None
    assert target_of(text) == text


def test_a_folder_is_served_by_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    assert WorkerConfig(model=f"{folder}/").public_name == "mine"
    assert WorkerConfig(model=str(folder), served_name="other").public_name == "other"
    assert WorkerConfig(model="demo").public_name == "demo"
    assert WorkerConfig().public_name == ""
