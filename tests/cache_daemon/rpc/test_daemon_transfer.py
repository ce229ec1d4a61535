"""``cache push`` and ``pull``: what one daemon has, another has afterwards, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.daemon_transfer import TenantScope, TransferResult, transfer_tenant
from kvsidecar.errors import InvalidRequest, Unavailable
from kvsidecar.net.channel import channel

from benchmarks.certificate_authority import CertificateAuthority
from benchmarks.node import Node, free_port
from benchmarks.peer import payload_of
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
    there.settle()
    there.restart_daemon()
    assert Peer(there).read(FIRST + SECOND) == 8, "it is durable"


def test_a_tenant_is_pulled_over_tls_by_a_certificate(start: Start, tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
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


def times(peer: Peer) -> dict[bytes, float | None]:
    """The seconds that each chunk has left; None without an end."""
    return {c.prefix_hash: c.ttl_seconds if c.HasField("ttl_seconds") else None for c in peer.list_all()}


def test_an_empty_address_is_not_taken_for_the_remote_tier(start: Start) -> None:
    node = start()
    peer = filled(node)
    for command, option in (("push", "--to"), ("pull", "--from")):
        with pytest.raises(InvalidRequest, match=f"{option} is empty; name one, or leave the option out to mean the"):
            cache(command, peer.namespace.hex(), option, "", of=node)
    peer.close()


def test_the_time_that_is_left_goes_along(start: Start) -> None:
    here, there = start(), start()
    peer, other = Peer(here), Peer(there)
    begin = peer.put(FIRST, ttl=86_400)
    end = peer.put(SECOND, len(FIRST), begin, ttl=3600)
    lasting = peer.put(THIRD)
    carried = transfer_tenant(peer.stub, other.stub, TenantScope(peer.namespace), descriptor())
    assert (carried.chunks, carried.known) == (3, 0)
    came, left = times(other), times(peer)
    assert came.keys() == left.keys() == {begin, end, lasting}
    assert came[lasting] is None
    for key, ttl in ((begin, 86_400), (end, 3600)):
        assert ttl / 2 < (came[key] or 0) <= ttl + 1


def test_what_is_there_is_kept_longer_but_never_shorter(start: Start) -> None:
    here, there = start(), start()
    peer, other = Peer(here), Peer(there)
    longer, shorter, lasting = [peer.put(ids, ttl=ttl) for ids, ttl in ((FIRST, 7200), (SECOND, 60), (THIRD, 0))]
    for ids, ttl in ((FIRST, 60), (SECOND, 7200), (THIRD, 60)):
        other.put(ids, ttl=ttl)
    carried = transfer_tenant(peer.stub, other.stub, TenantScope(peer.namespace), descriptor())
    assert (carried.chunks, carried.known, carried.lost, carried.payload_bytes) == (0, 3, 0, 0)
    found = times(other)
    assert min(found[longer] or 0, found[shorter] or 0) > 3600
    assert found[lasting] is None
    assert other.read(FIRST) == len(FIRST)


def test_a_time_that_nobody_may_ask_for_is_refused(start: Start) -> None:
    peer = Peer(start())
    header = peer.header(FIRST)
    begin = pb.StoreStart(descriptor=descriptor(), header=header, ttl_seconds=2_592_001)
    with pytest.raises(grpc.RpcError, match="ttl_seconds is 2592001; at most 2592000 is allowed"):
        peer.stub.Store(iter([pb.StoreRequest(start=begin)]))


class Losing:
    """A daemon's stub that evicts a chunk before each fetch of it."""

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
    carried = transfer_tenant(source, other.stub, TenantScope(peer.namespace), descriptor())
    assert (carried.chunks, carried.lost) == (2, 1)
    assert other.read(FIRST + THIRD) == 7


def test_a_daemon_that_dies_meanwhile_is_said_and_not_taken_for_losses(start: Start) -> None:
    for dies in ("source", "target"):
        here, there = start(), start()
        peer, other = filled(here), Peer(there)
        gone = here if dies == "source" else there

        def heard(done: int, total: int, gone: Node = gone) -> None:
            assert total == 3
            if done == 1:  # what continues it comes next
                gone.kill("daemon")

        with pytest.raises(Unavailable):
            transfer_tenant(peer.stub, other.stub, TenantScope(peer.namespace), descriptor(), heard)


def test_nothing_is_nothing(start: Start) -> None:
    here = start()
    peer = Peer(here)
    assert transfer_tenant(peer.stub, peer.stub, TenantScope(peer.namespace), descriptor()) == TransferResult()


def uses(peer: Peer) -> list[tuple[bytes, int, bool]]:
    """The uses of each chunk, and whether it is in the arena."""
    return [(chunk.prefix_hash, chunk.hits, chunk.resident) for chunk in peer.list_all()]


def test_a_copy_is_no_use_at_the_source(start: Start) -> None:
    """Each chunk was promoted, and counted as used, which also took it out of its session."""
    here, there = start(), start()
    filled(here).close()
    here.settle()
    here.restart_daemon()
    peer, other = Peer(here), Peer(there)
    request = pb.ReserveRequest(session_id=peer.session, headers=[peer.header([7])], group="agent")
    (reserved,) = peer.stub.Reserve(request).reservations
    peer.staged(reserved.staging)[:] = payload_of([7], reserved.staging.size_bytes)
    assert peer.commit(reserved).committed == 1
    before = uses(peer)
    assert sorted(resident for _, _, resident in before) == [False, False, False, True]
    assert transfer_tenant(peer.stub, other.stub, TenantScope(peer.namespace), descriptor()).chunks == 4
    assert uses(peer) == before
    assert peer.stub.ReleaseGroup(pb.ReleaseGroupRequest(namespace=peer.namespace, group="agent")).released == 1


def test_a_guest_at_the_source_may_copy_its_chunks(start: Start, tmp_path: Path) -> None:
    shared = tmp_path / "shared.sock"
    tmp_path.chmod(0o700)
    here, there = start(shared_socket=shared), start()
    filled(here, salt=b"secret")
    other = Peer(there)
    with channel(shared) as door:
        guest = CacheServiceStub(door)
        carried = transfer_tenant(guest, other.stub, TenantScope(other.namespace, b"secret"), descriptor())
    assert (carried.chunks, carried.lost) == (3, 0)
