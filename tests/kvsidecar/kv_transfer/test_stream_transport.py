"""Sessions of another host: chunks over mTLS, what a link does to them, and who may have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer import stream_transport
from kvsidecar.kv_transfer.block_copier import slots_of
from kvsidecar.kv_transfer.chunk_writer import WriteResult, write
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import handle_failure
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup, PrefixMatch
from kvsidecar.kv_transfer.session import Session
from kvsidecar.net.channel import ServiceAddress
from kvsidecar.payload_wire import decode_message, encode_data

from benchmarks.certificate_authority import CertificateAuthority
from benchmarks.condition_wait import until
from benchmarks.node import Node, free_port
from benchmarks.proxy import Proxy
from cache_daemon.rpc.stream_rpc import STREAM_TIMEOUT_SECONDS
from tests.cache_daemon.auth.conftest import ALICE, TENANTS
from tests.cache_daemon.conftest import code_of, descriptor, payload_of
from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS, fill
from tests.kvsidecar.kv_transfer.test_transfer import TOKENS, Engine

# Chunks of 4 MiB: more than a connection holds on its way.
GEOMETRY = Geometry(8, 4, 64, DATA_TYPE_FLOAT32, 16)
CHUNK, CHUNKS = 256, 6
PROMPT = list(range(5000, 5000 + CHUNK * CHUNKS))


class Remote:
    """A daemon with an mTLS listener, behind a network that fails on command."""

    def __init__(self, folder: Path, stack: ExitStack, **flags: Any) -> None:
        self.authority, port = CertificateAuthority(folder), free_port()
        server = self.authority.issue("server", hosts=("127.0.0.1",))
        self.worker = self.authority.issue("worker")
        flags |= {"heartbeat_ms": 1500, "tcp": f"127.0.0.1:{port}", "tls_cert": server.certificate}
        flags |= {"tls_key": server.key, "tls_client_ca": self.authority.ca}
        self.node = stack.enter_context(Node(workers=0, arena_bytes="128MiB", daemon_flags=flags))
        self.proxy = Proxy(port)
        stack.callback(self.proxy.close)
        self.port = port

    def address(self, port: int = 0, token: Path | None = None) -> ServiceAddress:
        files = (token, self.authority.ca, self.worker.certificate, self.worker.key)
        return ServiceAddress.remote(f"127.0.0.1:{port or self.port}", *files)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with ExitStack() as stack:
        yield Remote(tmp_path_factory.mktemp("remote"), stack)


@dataclass
class Attached:
    """A connection with its session, and the operations that a test makes over it."""

    link: DaemonConnection
    lookup: PrefixLookup = field(default_factory=lambda: PrefixLookup(GEOMETRY, 5.0))

    @property
    def session(self) -> Session:
        assert self.link.wait(30)
        found = self.link.session
        assert found is not None
        return found

    def store(
        self, ids: list[int] = PROMPT, salt: bytes = b"", filled: Callable[[], None] = lambda: None
    ) -> WriteResult:
        headers, parent = [], keys.tenant_root(self.link.namespace, salt)
        for start in range(0, len(ids), CHUNK):
            header = new_header(GEOMETRY, ids[start : start + CHUNK], start)
            header.parent_prefix_hash = parent
            parent = keys.prefix_hash(parent, header.token_ids)
            headers.append(header)

        def fill_one(i: int, payload: memoryview) -> None:
            payload[:] = payload_of(list(headers[i].token_ids), len(payload))
            filled()

        return write(self.session, salt, headers, fill_one, 2.0)

    def match(self, ids: list[int] = PROMPT, salt: bytes = b"") -> PrefixMatch:
        return self.lookup.match(self.session, ids, salt)

    def read(self, ids: list[int] = PROMPT, most: float = 60.0) -> int:
        """Read the stored chunks and check every byte; return the number of tokens."""
        found = self.match(ids)
        try:
            with closing(found.session.read(found.lease_id, found.matches, 5.0, most)) as payloads:
                for match, payload in zip(found.matches, payloads, strict=True):
                    assert isinstance(payload, memoryview)
                    these = ids[match.start_position : match.start_position + match.tokens]
                    assert payload == payload_of(these, match.payload_bytes)
        finally:
            self.lookup.release(found)
        return found.tokens


Attach = Callable[[ServiceAddress, str], Attached]


@pytest.fixture
def attach() -> Iterator[Attach]:
    with ExitStack() as stack:

        def attached(address: ServiceAddress, name: str) -> Attached:
            link = DaemonConnection(address, name, descriptor(name, GEOMETRY))
            stack.callback(link.close)
            return Attached(link)

        yield attached


def nothing_held(node: Node) -> None:
    """Soon; of a stream that nobody takes anything from, when the daemon has waited for it."""
    until(lambda: not node.cache_stats().leases and not node.cache_stats().reservations, 3 * STREAM_TIMEOUT_SECONDS)


@pytest.fixture(autouse=True)
def whole_network(remote: Remote) -> Iterator[None]:
    yield
    remote.proxy.go_on()


def test_what_is_written_here_is_read_there_and_the_other_way_round(remote: Remote, attach: Attach) -> None:
    here, there = attach(ServiceAddress(remote.node.cache_socket), "both"), attach(remote.address(), "both")
    assert here.store().newly_stored == (True,) * CHUNKS
    assert there.read() == len(PROMPT)
    assert there.store().newly_stored == (False,) * CHUNKS, "it is there already, and is not sent again"
    other = [token + 1 for token in PROMPT]
    assert there.store(other).newly_stored == (True,) * CHUNKS
    assert here.read(other) == len(other)
    assert not there.session.transport.zero_copy
    nothing_held(remote.node)


@pytest.mark.parametrize("bits", [16, 8])
def test_another_layout_on_another_host_has_what_one_engine_stored(remote: Remote, bits: int) -> None:
    with ExitStack() as stack:
        one = Engine(remote.node, f"layouts-{bits}", bits)
        stack.callback(one.link.close)
        two = Engine(remote.address(), f"layouts-{bits}", bits, transposed=True)
        stack.callback(two.link.close)
        fill(one.write, torch.from_numpy(slots_of([0, 1, 2, 3], BLOCK_TOKENS)), torch.bfloat16)
        assert one.store([2, 0, 3, 1], TOKENS).stored_chunks == 2
        assert two.load([4, 1, 0, 2], TOKENS) == len(TOKENS)
        if bits == 16:
            assert two.payload([4, 1, 0, 2]) == one.payload([2, 0, 3, 1])
        assert two.store([4, 1, 0, 2], TOKENS[::-1]).stored_chunks == 2
        assert one.load([0, 1, 2, 3], TOKENS[::-1], first=12) == len(TOKENS)


def test_a_link_that_is_cut_while_chunks_come_costs_a_moment_and_no_lease(remote: Remote, attach: Attach) -> None:
    there = attach(remote.address(remote.proxy.port), "cut")
    there.store()
    found, seen = there.match(), 0
    with pytest.raises((grpc.RpcError, ValueError)) as caught:  # noqa: PT012
        for _ in found.session.read(found.lease_id, found.matches, 5.0):
            seen += 1
            remote.proxy.cut()
    assert seen < CHUNKS
    assert handle_failure(there.link, found.session, caught.value)
    nothing_held(remote.node)
    remote.proxy.go_on()
    assert there.read() == len(PROMPT)


def test_a_link_that_stands_still_is_not_waited_for(
    remote: Remote, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = attach(remote.address(remote.proxy.port), "still")
    there.store()
    found = there.match()
    with monkeypatch.context() as hurried:
        hurried.setattr(stream_transport, "_STALL_SECONDS", 0.5)
        with pytest.raises(ConnectionError, match=r"sent nothing for 0\.5 s"):  # noqa: PT012
            for _ in found.session.read(found.lease_id, found.matches, 5.0):
                remote.proxy.hang()
    there.link.drop(found.session)
    nothing_held(remote.node)  # missed heartbeats ended the session
    remote.proxy.go_on()
    assert there.read() == len(PROMPT)
    held = there.session
    with monkeypatch.context() as hurried:
        hurried.setattr(stream_transport, "_STALL_SECONDS", 0.5)
        with pytest.raises(ConnectionError, match=r"took nothing for 0\.5 s"):
            there.store([token + 1 for token in PROMPT], filled=remote.proxy.hang)
    there.link.drop(held)
    nothing_held(remote.node)
    remote.proxy.go_on()
    assert there.read([token + 1 for token in PROMPT]) == 0


def test_a_slow_link_is_given_up_when_time_is_over(remote: Remote, attach: Attach) -> None:
    there = attach(remote.address(remote.proxy.port), "slow")
    there.store()
    remote.proxy.delay_seconds = 0.05
    with pytest.raises(grpc.RpcError) as caught:
        there.read(most=0.5)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    remote.proxy.go_on()
    nothing_held(remote.node)
    assert there.read() == len(PROMPT)


@pytest.mark.parametrize("missing", ["memory", "a thread"])
def test_who_cannot_receive_leaves_no_call_open(
    missing: str, remote: Remote, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is kept, and with it everything that it refers to: nothing is left to a collection of garbage."""
    here = attach(remote.address(), f"lacks {missing}")
    here.store()
    transport, calls = here.session.transport, list[Any]()
    assert isinstance(transport, stream_transport.StreamTransport)
    fetch = transport._fetch

    def opened(*arguments: Any, **options: Any) -> Any:
        calls.append(fetch(*arguments, **options))
        return calls[-1]

    transport._fetch = opened

    def none(*_: Any, **__: Any) -> Any:
        raise MemoryError(f"there is not enough of {missing}")

    with monkeypatch.context() as lacking:
        if missing == "memory":
            lacking.setattr(stream_transport.np, "empty", none)
        elif missing == "a thread":
            lacking.setattr(stream_transport.threading.Thread, "start", none)
        found = here.match()
        with pytest.raises(MemoryError, match=f"enough of {missing}"):
            list(found.session.read(found.lease_id, found.matches, 5.0))
        assert not any(call.is_active() for call in calls)
    here.lookup.release(found)
    assert here.read() == len(PROMPT)
    nothing_held(remote.node)


def test_a_daemon_that_dies_is_attached_to_again(tmp_path: Path, attach: Attach) -> None:
    with ExitStack() as stack:
        own = Remote(tmp_path, stack)
        there = attach(own.address(), "dies")
        there.store()
        own.node.settle()
        held = there.match()
        own.node.kill("daemon")
        with pytest.raises((grpc.RpcError, ValueError)) as caught:
            list(held.session.read(held.lease_id, held.matches, 5.0))
        handle_failure(there.link, held.session, caught.value)
        own.node.start_daemon()
        assert there.session is not held.session
        assert there.read() == len(PROMPT), "from its disk"


def test_a_token_opens_its_own_tenant_and_its_leases_are_nobody_elses(tmp_path: Path, attach: Attach) -> None:
    tenants, token = tmp_path / "tenants.toml", tmp_path / "token"
    for file, text in ((tenants, TENANTS), (token, ALICE)):
        file.touch(0o600)
        file.write_text(text)
    with ExitStack() as stack:
        own = Remote(tmp_path, stack, tenants=tenants)
        operator, alice = (
            attach(ServiceAddress(own.node.cache_socket), "salts"),
            attach(own.address(token=token), "salts"),
        )
        operator.store(PROMPT[:CHUNK], salt=b"salt-of-bob")
        held = operator.match(PROMPT[:CHUNK], salt=b"salt-of-bob")
        with pytest.raises(grpc.RpcError) as caught:
            alice.match(PROMPT[:CHUNK], salt=b"salt-of-bob")
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        before = alice.session
        handle_failure(alice.link, before, caught.value)
        assert alice.session is before, "requests of her own tenant go on"
        code, _ = code_of(lambda: alice.store(PROMPT[:CHUNK], salt=b"salt-of-bob"))
        assert code == grpc.StatusCode.PERMISSION_DENIED
        names = [match.prefix_hash for match in held.matches]
        for session, said in ((held.session, "another caller's"), (alice.session, "has ended, or holds no such")):
            request = pb.FetchRequest(session_id=session.id, lease_id=held.lease_id, prefix_hashes=names)
            code, text = code_of(lambda request=request: list(alice.session.stub.Fetch(request, timeout=30)))  # type: ignore[misc]
            assert code == grpc.StatusCode.PERMISSION_DENIED
            assert said in text


def message(match: pb.ChunkMatch, checksum: int = 0) -> pb.FetchResponse:
    return pb.FetchResponse(
        header={"prefix_hash": match.prefix_hash, "payload_bytes": match.payload_bytes, "checksum": checksum}  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (lambda m: [message(m), pb.FetchResponse(data=b"x" * 8)], "do not have its checksum"),
        (lambda m: [message(m), pb.FetchResponse(data=b"x" * 9)], "9 bytes of a chunk came, it has 8"),
        (lambda m: [message(m), pb.FetchResponse(data=b"")], "0 bytes of a chunk came, it has 8"),
        (lambda m: [message(m), pb.FetchResponse(data=b"x")], "ended within a chunk"),
        (lambda m: [message(pb.ChunkMatch(prefix_hash=b"b", payload_bytes=8))], "another chunk"),
        (lambda m: [message(pb.ChunkMatch(prefix_hash=b"a", payload_bytes=1 << 50))], "another chunk"),
        (lambda m: [pb.FetchResponse(data=b"x" * 8)], "another chunk"),
        (lambda m: [], "ended within a chunk"),
    ],
)
def test_nothing_but_the_chunk_that_was_asked_for_is_believed(
    sent: Callable[[pb.ChunkMatch], list[pb.FetchResponse]], said: str
) -> None:
    """What a daemon would have to send that is broken, or is none."""
    match = pb.ChunkMatch(prefix_hash=b"a", payload_bytes=8)

    class Sent:
        def __init__(self, messages: list[pb.FetchResponse | memoryview]) -> None:
            self._messages = iter(messages)

        def __next__(self) -> pb.FetchResponse | memoryview:
            return next(self._messages)

        def cancel(self) -> None:
            pass

    def fetch(request: pb.FetchRequest, timeout: float) -> Sent:
        return Sent([decode_message(message.SerializeToString()) for message in sent(match)])

    channel: Any = SimpleNamespace(unary_stream=lambda *_, **__: fetch)
    transport = stream_transport.StreamTransport(pb.Welcome(), None, channel)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        list(transport.read(b"lease", [match], 5.0))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16_383, 16_384, 1 << 20])
def test_pieces_on_the_wire_are_protobufs(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert encode_data(memoryview(data)) == pb.FetchResponse(data=data).SerializeToString()
    found = decode_message(pb.FetchResponse(data=data).SerializeToString())
    assert isinstance(found, memoryview)
    assert found == data


def test_other_messages_are_left_to_protobuf() -> None:
    header = pb.FetchResponse(header={"prefix_hash": b"a"})  # type: ignore[arg-type]
    assert decode_message(header.SerializeToString()) == header
    twice = pb.FetchResponse(data=b"a").SerializeToString() + pb.FetchResponse(data=b"b").SerializeToString()
    assert decode_message(twice) == pb.FetchResponse(data=b"b")
    for broken in (b"\x12", b"\x12\x05ab", b"\x12\xff\xff\xff\xff\xff\xff"):
        with pytest.raises(DecodeError):
            decode_message(broken)


def test_what_cannot_be_an_address_is_refused(remote: Remote, tmp_path: Path) -> None:
    for address, said in (
        ("nowhere", "'nowhere' is not an address; write it like"),
        ("10.0.0.1:0", "a port from 1 is needed"),
        ("10.0.0.1:7401", "without TLS everybody in between reads along"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            ServiceAddress.remote(address)
    with pytest.raises(ConfigurationError, match="cannot read the CA file"):
        ServiceAddress.remote("10.0.0.1:7401", ca=tmp_path / "none.pem")
    with pytest.raises(ConfigurationError, match="a certificate and its key go together"):
        ServiceAddress.remote("10.0.0.1:7401", ca=remote.authority.ca, certificate=remote.worker.certificate)
