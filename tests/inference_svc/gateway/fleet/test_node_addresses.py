"""--nodes as people write it, and what a gateway is not started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.service_settings import read_settings
from kvsidecar.errors import ConfigurationError
from pydantic import ValidationError

from inference_svc.gateway.fleet.node_addresses import NodeAddress, parse_node_addresses
from inference_svc.gateway.gateway_config import GatewayConfig


def test_a_list_of_nodes() -> None:
    assert parse_node_addresses("http://a:8000, https://[::1]:1/,dns+http://nodes.svc:8000") == [
        NodeAddress("http", "a", 8000),
        NodeAddress("https", "::1", 1),
        NodeAddress("http", "nodes.svc", 8000, every=True),
    ]
    assert str(NodeAddress("https", "::1", 1)) == "https://[::1]:1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (",", "name at least one node"),
        ("a:8000", "'a:8000' is no node; write http"),
        ("http://a", "is no node"),
        ("http://a:99999", "is no node"),
        ("ftp://a:80", "is no node"),
        ("http://a:80/v1", "without a path"),
        ("http://u:secret@a:80", "a node has no name and password"),
        ("http://a:80,http://a:80/", "http://a:80 is named twice"),
        ("dns+http://10.0.0.1:80", "has no name to look up"),
    ],
)
def test_what_is_no_node_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="^" + ".*") as caught:
        parse_node_addresses(text)
    assert why in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"nodes": "http://a:1", "workers": "/w.sock"}, "workers or nodes"),
        ({"nodes": "a"}, "is no node"),
        ({"tls_cert": Path("c")}, "tls_cert and tls_key go together"),
        ({"node_cert_key": Path("c")}, "node_cert and node_cert_key go together"),
        ({"tls_client_ca": Path("c")}, "it is for listening with tls_cert and tls_key"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        GatewayConfig(**settings)


def test_a_refusal_shows_no_key() -> None:
    given = {"nodes": "http://a:1", "workers": "/w.sock", "node_key": "hush-hush", "api_key": "hush-hush"}
    with pytest.raises(ConfigurationError, match="workers or nodes") as caught:
        read_settings(GatewayConfig, given, None)
    assert "hush" not in str(caught.value)
