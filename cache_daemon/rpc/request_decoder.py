"""Request decoding: checks large requests first; reports invalid requests as InvalidRequest.

Without this decoder, gRPC would answer an undecodable request with UNKNOWN.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from kvsidecar.errors import InvalidRequest

from cache_daemon.rpc.element_limits import MAX_PIECE_BYTES, ElementLimits

T = TypeVar("T")
# A message up to this length decodes in a millisecond and into at most one MiB.
_UNCHECKED_BYTES = 8 << 10


@dataclass(frozen=True)
class UndecodableRequest:
    """Placeholder for a request that cannot be decoded."""

    error: InvalidRequest


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """A large request, checked and split, for decoding piece by piece."""

    kind: type[Any]
    pieces: tuple[bytes, ...]
    size_bytes: int

    async def decode(self) -> Any:
        """Decode the request, yielding to the event loop between pieces. Raises InvalidRequest."""
        request = self.kind()
        for piece in self.pieces:
            try:
                request.MergeFromString(piece)
            except DecodeError as error:
                raise _undecodable(error) from error
            await asyncio.sleep(0)
        return request


async def decode_request(request: T | EncodedRequest | UndecodableRequest) -> T:
    """Return the decoded request. Raises InvalidRequest."""
    if isinstance(request, UndecodableRequest):
        raise request.error
    return await request.decode() if isinstance(request, EncodedRequest) else request


class RequestDecoder:
    """Request deserializer of a method; never raises.

    It checks large messages before decoding them.
    """

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
            # The traceback would keep the message alive until the next garbage collection.
            return UndecodableRequest(error.with_traceback(None))


def _undecodable(error: DecodeError) -> InvalidRequest:
    return InvalidRequest(f"the message cannot be decoded as the method's request: {error}")
