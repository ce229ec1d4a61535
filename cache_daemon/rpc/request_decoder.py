"""Requests that cannot be decoded: the caller's error, said like all others, and not gRPC's UNKNOWN. And answers that
are encoded already."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from kvsidecar.errors import InvalidRequest

from cache_daemon.rpc.element_limits import MAX_PIECE_BYTES, ElementLimits

T = TypeVar("T")
# A message of this length decodes in a millisecond and into one MiB, whatever it holds.
_UNCHECKED_BYTES = 8 << 10


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
