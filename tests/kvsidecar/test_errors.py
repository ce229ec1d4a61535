"""Errors on their way over gRPC: whatever they quote, they arrive with their reason."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import InvalidRequest, KVSidecarError, NamespaceMismatch, from_rpc, unary

from benchmarks.node import Node
from benchmarks.peer import GEOMETRY, descriptor


class Quoting:
    """A service whose errors quote the request."""

    @unary("test")
    async def Stats(self, request: bytes, _: object) -> bytes:
        raise InvalidRequest(f"it is {request.decode('utf-8', 'surrogateescape')!s}, allowed is less", param="x" * 5000)


@pytest.fixture
async def target() -> Iterator[str]:  # type: ignore[misc]
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(Quoting().Stats)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Stats": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize("sent", ["a" * 1_000_000, "\u20ac" * 100_000, "\U0001f600" * 3000, "short", "half \udced"])
async def test_what_is_quoted_ends_no_call_without_its_reason(target: str, sent: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary("/test/Stats")(sent.encode("utf-8", "surrogateescape"))
    error = from_rpc(caught.value)
    assert type(error) is InvalidRequest
    assert str(error).startswith("it is " + sent[:5])
    assert str(error).endswith("allowed is less")
    assert len(str(error).encode()) < 2000


def test_a_namespace_of_any_length_is_refused_as_one_that_does_not_fit(node: Node) -> None:
    hello = pb.Hello(
        protocol_version=2, client_name="x", descriptor=descriptor("m", GEOMETRY), namespace=b"\xff" * 35_000
    )
    with node.cache_channel() as channel:
        call = CacheServiceStub(channel).Attach(iter([pb.AttachRequest(hello=hello)]), timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    error: KVSidecarError = from_rpc(caught.value)
    assert isinstance(error, NamespaceMismatch)
    assert len(str(error)) < 400
