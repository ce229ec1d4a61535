"""Requests that cannot be decoded: the caller's error, said like all others, and not gRPC's UNKNOWN. And answers that
are encoded already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import add_CacheServiceServicer_to_server
from kvsidecar.errors import InvalidRequest

from cache_daemon.rpc.element_limits import MAX_PIECE_BYTES, ElementLimits

T = TypeVar("T")
# A message of this length decodes in a millisecond and into one MiB, whatever it holds.
_UNCHECKED_BYTES = 8 << 10
_SERVICE = pb.DESCRIPTOR.services_by_name["CacheService"]


@dataclass(frozen=True)
class UndecodableRequest:
    """Stands in the place of a request."""

    error: InvalidRequest


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """A large request, checked and cut, which is decoded a piece at a time."""

    kind: type[Any]
    pieces: tuple[bytes, ...]
    size_bytes: int

    async def decode(self) -> Any:
        """The request. Others have their turn between the pieces. Raises InvalidRequest."""
        request = self.kind()
        for piece in self.pieces:
            try:
                request.MergeFromString(piece)
            except DecodeError as error:
                raise _undecodable(error) from error
            await asyncio.sleep(0)
        return request


async def decode_request(request: T | EncodedRequest | UndecodableRequest) -> T:
    """The request. Raises InvalidRequest."""
    if isinstance(request, UndecodableRequest):
        raise request.error
    return await request.decode() if isinstance(request, EncodedRequest) else request


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Adds a servicer with lenient decoding of requests.

    Its methods get UndecodableRequest for what is no message or exceeds a limit, EncodedRequest for a large one, and
    call ``decode_request``. Their responses may be encoded bytes, which are sent as they are.
    """
    lenient: Any = _HandlerRegistrar(server)
    add_CacheServiceServicer_to_server(servicer, lenient)


class _HandlerRegistrar:
    """Takes the handlers that generated code makes."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same ones come by name, too."""

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


class RequestDecoder:
    """A method's request deserializer, which checks what is large before it decodes it. Never raises."""

    def __init__(self, kind: type[Message]) -> None:
        descriptor: Any = kind.DESCRIPTOR
        self._kind: type[Any] = kind
        self._limits = ElementLimits(descriptor)

    def __call__(self, data: bytes) -> Any:
        try:
            if len(data) > _UNCHECKED_BYTES:
                pieces = self._limits.pieces(data)
                if len(data) > MAX_PIECE_BYTES:
                    return EncodedRequest(self._kind, tuple(pieces), len(data))
            return self._kind.FromString(data)
        except DecodeError as error:
            return UndecodableRequest(_undecodable(error))
        except InvalidRequest as error:
            # Its traceback would keep the message until the next collection of cycles.
            return UndecodableRequest(error.with_traceback(None))


def _undecodable(error: DecodeError) -> InvalidRequest:
    return InvalidRequest(f"the message cannot be decoded as the method's request: {error}")
