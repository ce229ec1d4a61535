"""Agreement on a protocol version at Attach, between releases that speak several."""

from __future__ import annotations

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import FailedPrecondition
from kvsidecar.kv_transfer import daemon_connection
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress
from kvsidecar.protocol_versions import ProtocolVersions

from benchmarks.node import Node
from tests.cache_daemon.conftest import descriptor
from tests.deploy.playing import wait_for


def welcome(node: Node, oldest: int, newest: int = 0) -> pb.Welcome:
    hello = pb.Hello(
        protocol_version=oldest, newest_protocol_version=newest, client_name="p", descriptor=descriptor(),
        namespace=keys.namespace_id(descriptor()),
    )  # fmt: skip
    with node.cache_channel() as channel:
        call = CacheServiceStub(channel).Attach(iter([pb.AttachRequest(hello=hello)]))
        return next(call).welcome  # type: ignore[no-any-return]


@pytest.mark.parametrize(("oldest", "newest"), [(2, 0), (2, 2), (1, 2), (1, 9)])
def test_a_session_has_the_newest_version_of_both(daemon: Node, oldest: int, newest: int) -> None:
    assert welcome(daemon, oldest, newest).protocol_version == 2


@pytest.mark.parametrize(
    ("oldest", "newest", "sentence"),
    [
        (1, 0, "the daemon speaks protocol version 2 and the worker 1; upgrade the worker"),
        (3, 4, "the daemon speaks protocol version 2 and the worker 3 to 4; upgrade the daemon"),
    ],
)
def test_without_a_common_version_attach_says_what_to_upgrade(
    daemon: Node, oldest: int, newest: int, sentence: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        welcome(daemon, oldest, newest)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, sentence)


class Lines:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def info(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def test_a_worker_that_is_too_new_logs_it_once_and_serves_without_cache(
    daemon: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_connection, "SPOKEN", ProtocolVersions(3, 4))
    lines = Lines()
    connection = DaemonConnection(ServiceAddress(daemon.cache_socket), "w", descriptor(), maps=False, log=lines)
    try:
        wait_for(lambda: lines.warnings, 20)
        assert not connection.wait(1)
        (line,) = lines.warnings
        assert "the daemon speaks protocol version 2 and the worker 3 to 4; upgrade the daemon" in line
    finally:
        connection.close()


def test_ranges_that_overlap_in_part_agree_on_the_newest_common_version() -> None:
    assert ProtocolVersions(2, 4).common(ProtocolVersions(3, 9)) == 4
    assert ProtocolVersions(2, 4).common(ProtocolVersions(1, 3)) == 3
    with pytest.raises(FailedPrecondition):
        ProtocolVersions(2, 4).common(ProtocolVersions(5, 6))
