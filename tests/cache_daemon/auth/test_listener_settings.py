"""Settings that contradict each other stop the start with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.service_settings import read_settings
from kvsidecar.errors import ConfigurationError

from cache_daemon.config import DaemonConfig

TLS = {"tls_cert": "c.pem", "tls_key": "k.pem"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tcp": "0.0.0.0:7401"}, "tcp is '0.0.0.0:7401': it needs --tls-cert and --tls-key, or --tcp-insecure"),
        ({"tcp": "127.0.0.1:7401"}, "it needs --tls-cert and --tls-key, or --tcp-insecure on a loopback address"),
        ({"tcp": "0.0.0.0:7401", "tls_cert": "c.pem"}, "it needs --tls-cert and --tls-key"),
        ({"tcp": "0.0.0.0:7401", "tls_key": "k.pem"}, "it needs --tls-cert and --tls-key"),
        ({"tcp": "0.0.0.0:7401", **TLS}, "it needs --tls-client-ca, or --tenants"),
        ({"tcp": "0.0.0.0:7401", "tcp_insecure": "true"}, "--tcp-insecure is for loopback addresses only"),
        ({"tcp": "[::]:7401", "tcp_insecure": "true"}, "--tcp-insecure is for loopback addresses only"),
        ({"tcp": "cache.example:7401", "tcp_insecure": "true"}, "--tcp-insecure is for loopback addresses only"),
        ({"tcp": "127.0.0.1:7401", "tcp_insecure": "true", **TLS}, "exclude each other"),
        ({"tcp_insecure": "true"}, "--tcp-insecure is for TCP; set --tcp"),
        (TLS, "--tls-cert is for TCP; set --tcp"),
        ({"tls_client_ca": "a.pem"}, "--tls-client-ca is for TCP; set --tcp"),
        ({"tcp": "7401"}, "tcp is '7401': '7401' is not an address; write it like 127.0.0.1:7401"),
        ({"tcp": "::1:7401"}, "is not an address"),
        ({"tcp": "127.0.0.1:99999"}, "is not an address"),
        ({"socket": "/run/x/a.sock", "shared_socket": "/run/x/a.sock"}, "choose another path"),
        ({"socket_group": "llm"}, "socket_group is 'llm': it is the group of --shared-socket, which is not set"),
        ({"staging_bytes": "4k"}, "too small for staging"),
        (
            {"store_bytes": "0"},
            "0 bytes is too small for a store; at least 1MiB is needed, or --store none",
        ),
        ({"store_bytes": "1KiB"}, "too small for a store"),
        ({"compression": "gzip"}, "compression is 'gzip'"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_settings(DaemonConfig, given, None)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"tcp": "0.0.0.0:7401", **TLS, "tls_client_ca": "a.pem"},
        {"tcp": "0.0.0.0:7401", **TLS, "tenants": "t.toml"},
        {"tcp": "[::1]:7401", "tcp_insecure": "true"},
        {"tcp": "localhost:7401", "tcp_insecure": "true"},
        {"tcp": "127.8.9.10:7401", "tcp_insecure": "true"},
        {"shared_socket": "/run/x/shared.sock", "socket_group": "llm"},
        {"tenants": "t.toml"},
    ],
)
def test_what_goes_together_is_accepted(given: dict[str, Any]) -> None:
    assert read_settings(DaemonConfig, given, None)


def test_the_stores_key_is_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSIDECAR_CACHE_STORE_KEY", "5ec2e7" * 10)
    file = tmp_path / "daemon.toml"
    file.write_text('log-level = "warning"\n')
    for config in (read_settings(DaemonConfig, {}, None), read_settings(DaemonConfig, {}, file)):
        assert config.store_key.get_secret_value() == "5ec2e7" * 10
        assert "5ec2e7" not in repr(config) + repr(config.model_dump()) + config.model_dump_json()
    with pytest.raises(ConfigurationError, match="the environment sets the key, too") as caught:
        read_settings(DaemonConfig, {"store_key_file": Path("k")}, None)
    assert "5ec2e7" not in str(caught.value)
