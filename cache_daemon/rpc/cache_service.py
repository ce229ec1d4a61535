"""The gRPC service, assembled from its servicers, and its registration with a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import Message
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceServicer, add_CacheServiceServicer_to_server

from cache_daemon.rpc.admin_rpc import AdminServicer
from cache_daemon.rpc.chunk_rpc import ChunkServicer
from cache_daemon.rpc.request_decoder import RequestDecoder
from cache_daemon.rpc.session_rpc import SessionServicer
from cache_daemon.rpc.stream_rpc import StreamServicer

_SERVICE = pb.DESCRIPTOR.services_by_name["CacheService"]


class CacheService(SessionServicer, ChunkServicer, StreamServicer, AdminServicer, CacheServiceServicer):
    """All RPCs of the daemon. All methods run on the daemon's event loop.

    One instance per listener.
    """


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Add a servicer with lenient decoding of requests.

    Its methods get an UndecodableRequest for bytes that are no message or exceed a limit, and an EncodedRequest for a
    large message; so they must call ``decode_request``. Methods may return encoded bytes, which are sent unchanged.
    """
    lenient: Any = _HandlerRegistrar(server)
    add_CacheServiceServicer_to_server(servicer, lenient)


class _HandlerRegistrar:
    """Registers generated handlers with another request decoder."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignore the call: the generated code also registers the same handlers by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        lenient = {
            name: handler._replace(
                request_deserializer=RequestDecoder(_request_of(name)),
                response_serializer=_unless_encoded(handler.response_serializer),
            )
            for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, lenient),))


def _unless_encoded(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda answer: answer if isinstance(answer, bytes) else encode(answer)


def _request_of(method: str) -> type[Message]:
    found: type[Message] = getattr(pb, _SERVICE.methods_by_name[method].input_type.name)
    return found
