"""``cache push`` and ``pull``: what one daemon has, another has afterwards, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.carrying import Carried, Tenant, carry
from kvsidecar.errors import InvalidRequest

from benchmarks.authority import Authority
from benchmarks.node import Node, free_port
from tests.cache_daemon.conftest import Peer, descriptor
from tests.cache_daemon.operators import cache

Start = Callable[..., Node]
FIRST, SECOND, THIRD = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9]


def filled(node: Node, salt: bytes = b"") -> Peer:
    """A worker that has stored a prompt of two chunks, and another end of it."""
    peer = Peer(node)
    begin = peer.put(FIRST, salt=salt)
    peer.put(SECOND, len(FIRST), begin, salt=salt)
    peer.put(THIRD, len(FIRST), begin, salt=salt)
    return peer


def test_what_was_pushed_is_there_and_is_not_pushed_again(start: Start) -> None:
    here, there = start(), start()
    peer, other = filled(here), Peer(there)
    peer.put(FIRST, salt=b"another")
    name = peer.namespace.hex()
    assert cache("push", name, "--to", there.cache_socket, of=here).startswith("pushed 3 chunks (")
    assert other.read(FIRST + SECOND) == 8
    assert other.read(FIRST + THIRD) == 7
    assert other.read(FIRST, salt=b"another") == 0, "a tenant is named, or is not meant"
    assert "pushed 0 chunks (0 B)" in (again := cache("push", name, "--to", there.cache_socket, of=here))
    assert again.strip().endswith("3 were there")
    there.restart_daemon()
    assert Peer(there).read(FIRST + SECOND) == 8, "it is durable"


def test_a_tenant_is_pulled_over_tls_by_a_certificate(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, carrier = authority.issue("server", hosts=("127.0.0.1",)), authority.issue("carrier")
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[tenant.carrier]\noperator = true\ncertificates = ["carrier"]\n')
    tenants.chmod(0o600)
    address = f"127.0.0.1:{free_port()}"
    far = start(
        tcp=address, tls_cert=server.certificate, tls_key=server.key, tls_client_ca=authority.ca, tenants=tenants
    )
    peer, near = filled(far, salt=b"s3cret"), start()
    way = ("--from-ca", authority.ca, "--from-cert", carrier.certificate, "--from-key", carrier.key)
    secret = tmp_path / "salt"
    secret.write_text("s3cret\n")
    pulled = cache("pull", peer.namespace.hex(), "--from", address, *way, "--salt", f"@{secret}", of=near)
    assert pulled.startswith("pulled 3 chunks (")
    assert Peer(near).read(FIRST + SECOND, salt=b"s3cret") == 8


def test_a_namespace_that_nobody_knows_is_said(start: Start) -> None:
    here, there = start(), start()
    with pytest.raises(InvalidRequest, match="no worker of the namespace"):
        cache("push", "ab" * 32, "--to", there.cache_socket, of=here)
    with pytest.raises(InvalidRequest, match="64 hex digits"):
        cache("push", "ab", "--to", there.cache_socket, of=here)


class Losing:
    """A stub of a daemon that evicts a chunk when somebody wants to fetch it."""

    def __init__(self, stub: Any, key: bytes) -> None:
        self._stub, self._key = stub, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    def Fetch(self, request: pb.FetchRequest, timeout: float) -> Any:
        if request.prefix_hash == self._key:
            prefix = pb.PrefixRef(
                namespace=request.namespace, tenant_salt=request.tenant_salt, prefix_hash=request.prefix_hash
            )
            self._stub.Delete(pb.DeleteRequest(prefix=prefix), timeout=timeout)
        return self._stub.Fetch(request, timeout=timeout)


def test_what_goes_meanwhile_is_left_out_with_what_continues_it(start: Start) -> None:
    peer, other = filled(start()), Peer(start())
    found = peer.match(FIRST + SECOND)
    peer.release(found)
    source = Losing(peer.stub, found.matches[1].prefix_hash)
    carried = carry(source, other.stub, Tenant(peer.namespace), descriptor())
    assert (carried.chunks, carried.lost) == (2, 1)
    assert other.read(FIRST + THIRD) == 7


def test_nothing_is_nothing(start: Start) -> None:
    here = start()
    peer = Peer(here)
    assert carry(peer.stub, peer.stub, Tenant(peer.namespace), descriptor()) == Carried()
