"""Without keys, the kernel's user id of the sender decides who is an operator."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.peer_uid import user_of
from inference_svc.gateway.request_guard import NODE
from tests.inference_svc.gateway.conftest import Gateway

# What nginx sends for `proxy_pass http://127.0.0.1:8000`: this Host, and nothing that says that it hands something on.
_ASK = """
import encodings.idna, http.client, os, sys  # all before the folder of Python is closed to it
os.setgroups([]); os.setgid(54321); os.setuid(54322)
asked = http.client.HTTPConnection(sys.argv[1]); asked.request("GET", sys.argv[2])
print(asked.getresponse().read().decode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_proxy_of_another_user_is_no_operator_though_it_says_nothing(gateway: Gateway) -> None:
    command = [sys.executable, "-c", _ASK, gateway.url.removeprefix("http://"), NODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["operator"] is False


@pytest.fixture(params=["127.0.0.1", "::1"])
def scope(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A request of this process to itself, as uvicorn tells of it."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as client:
        try:
            listener.bind((request.param, 0))
        except OSError:
            pytest.skip(f"this machine has no {request.param}")
        listener.listen()
        client.connect(listener.getsockname())
        with listener.accept()[0] as here:
            ends = {"client": here.getpeername()[:2], "server": here.getsockname()[:2]}
            yield {"type": "http", "headers": [(b"host", b"localhost:8000")], **ends}


def _operator(scope: dict[str, Any], **settings: Any) -> bool:
    return ApiKeys(GatewayConfig(**settings)).is_operator(scope)


def test_ones_own_processes_are_the_operators(scope: dict[str, Any]) -> None:
    assert _operator(scope)
    for headers in ([(b"host", b"127.0.0.1")], [(b"host", b"[::1]:8000")]):
        assert _operator({**scope, "headers": headers})


@pytest.mark.parametrize(
    "settings",
    [{"local_operator": False}, {"host": "0.0.0.0"}, {"host": "::"}, {"api_key": "a"}, {"operator_key": "b"}],
    ids=str,
)
def test_not_where_others_reach_it_nor_with_keys_nor_switched_off(
    scope: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert not _operator(scope, **settings)


@pytest.mark.parametrize("name", ["Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Proto"])
def test_what_was_handed_on_is_a_guests(scope: dict[str, Any], name: str) -> None:
    handed_on = (name.lower().encode(), b"203.0.113.7")
    assert not _operator({**scope, "headers": [*scope["headers"], handed_on]})


@pytest.mark.parametrize("origin", [b"https://chat.example.com", b"http://localhost:9000", b"null"])
def test_a_page_of_another_site_is_a_guests(scope: dict[str, Any], origin: bytes) -> None:
    assert _operator({**scope, "headers": [*scope["headers"], (b"origin", b"http://localhost:8000")]})
    assert not _operator({**scope, "headers": [*scope["headers"], (b"origin", origin)]})


@pytest.mark.parametrize("host", [b"elsewhere.example", b"localhost.example:8000", b""])
def test_another_name_is_a_guests(scope: dict[str, Any], host: bytes) -> None:
    assert not _operator({**scope, "headers": [(b"host", host)]})


def test_a_connection_that_its_process_has_left_is_nobodys() -> None:
    """The socket then belongs to root."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        with listener.accept()[0] as here:
            ends = here.getpeername(), here.getsockname()
            assert user_of(*ends) == os.geteuid()
            client.close()
            assert user_of(*ends) is None
    assert user_of(*ends) is None
