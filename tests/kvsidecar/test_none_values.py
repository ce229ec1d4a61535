"""``none`` as the value of a setting: no value where a setting may have none, in environment, file and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.service_settings import ServiceSettings, read_settings

from cache_daemon.config import DaemonConfig
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.node.supervisor import ServeConfig
from inference_svc.server.worker_config import WorkerConfig

SERVICES = [DaemonConfig, WorkerConfig, GatewayConfig, ServeConfig]
OPTIONAL = [
    (settings, name)
    for settings in SERVICES
    for name, field in settings.model_fields.items()
    if "None" in str(field.annotation)
]


def variable(settings: type[ServiceSettings], name: str) -> str:
    return f"{settings.model_config['env_prefix']}{name.upper()}"


@pytest.mark.parametrize(("settings", "name"), OPTIONAL)
def test_none_in_the_environment_is_no_value(
    monkeypatch: pytest.MonkeyPatch, settings: type[ServiceSettings], name: str
) -> None:
    monkeypatch.setenv(variable(settings, name), "none")
    assert getattr(read_settings(settings, {}, None), name) is None


def test_the_settings_without_a_daemon_or_a_store_are_among_them() -> None:
    assert {
        (DaemonConfig, "store"),
        (WorkerConfig, "cache_socket"),
        (GatewayConfig, "cache_socket"),
        (ServeConfig, "lora_root"),
    } <= set(OPTIONAL)


def test_none_in_the_environment_overrides_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text('store = "/srv/store"\ntrace = "none"\n')
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "none")
    config = read_settings(DaemonConfig, {}, file)
    assert config.store is None
    assert config.trace is None
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "/srv/other")
    assert read_settings(DaemonConfig, {}, file).store == Path("/srv/other")


def test_a_flag_overrides_none_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "none")
    assert read_settings(DaemonConfig, {"store": "/srv/store"}, None).store == Path("/srv/store")
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "/srv/store")
    assert read_settings(DaemonConfig, {"store": "none"}, None).store is None


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was the current folder."""
    default = DaemonConfig().store
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE", "")
    assert read_settings(DaemonConfig, {}, None).store == default
    assert read_settings(DaemonConfig, {"trace": "t"}, None).store == default


def test_the_environment_may_complete_a_rule_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment was checked alone, where its CA had no remote tier."""
    file = tmp_path / "daemon.toml"
    file.write_text('remote = "rediss://cache:6379"\n')
    monkeypatch.setenv("KVSIDECAR_CACHE_REMOTE_CA", "/srv/ca.pem")
    assert read_settings(DaemonConfig, {}, file).remote_ca == Path("/srv/ca.pem")


def test_settings_made_in_python_know_none_too() -> None:
    assert WorkerConfig(cache_socket="none").cache_socket is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "name", "text"),
    [
        (DaemonConfig, "compression", "none"),
        (DaemonConfig, "remote_ttl", "none"),
        (WorkerConfig, "repair", "none"),
        (WorkerConfig, "name", "none"),
        (WorkerConfig, "served_name", "none"),
        (ServeConfig, "store", "none"),
        (DaemonConfig, "store", "nonesuch"),
    ],
)
def test_a_text_that_a_setting_allows_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: type[ServiceSettings], name: str, text: str
) -> None:
    def value_of(given: dict[str, Any], config: Path | None = None) -> str:
        return str(getattr(read_settings(settings, given, config), name))

    file = tmp_path / "service.toml"
    file.write_text(f'{name} = "{text}"\n')
    assert value_of({name: text}) == text
    assert value_of({}, file) == text
    monkeypatch.setenv(variable(settings, name), text)
    assert value_of({}) == text
