"""Requests that cannot be decoded: the caller's error, said like all others, and not gRPC's UNKNOWN. And answers that
are encoded already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from kvsidecar.cache.v1.cache_pb2_grpc import add_CacheServiceServicer_to_server
from kvsidecar.errors import InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True)
class Undecodable:
    """Stands in the place of a request."""

    why: str


def decoded(request: T | Undecodable) -> T:
    """The request. Raises InvalidRequest."""
    if isinstance(request, Undecodable):
        raise InvalidRequest(f"the message cannot be decoded as the method's request: {request.why}")
    return request


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Adds a servicer whose methods are given Undecodable for what is no message, and ask ``decoded``; what they answer
    may be bytes, which are sent as they are."""
    lenient: Any = _Lenient(server)
    add_CacheServiceServicer_to_server(servicer, lenient)


class _Lenient:
    """Takes the handlers that generated code makes."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same ones come by name, too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        lenient = {
            name: handler._replace(
                request_deserializer=_or_undecodable(handler.request_deserializer),
                response_serializer=_unless_encoded(handler.response_serializer),
            )
            for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, lenient),))


def _unless_encoded(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda answer: answer if isinstance(answer, bytes) else encode(answer)


def _or_undecodable(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def attempt(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return Undecodable(str(error))

    return attempt
