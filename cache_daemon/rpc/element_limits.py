"""Element counts of encoded messages, checked before a message is decoded.

An element of a repeated field may take two bytes on the wire and 180 bytes in memory, so the length of a message does
not bound the memory for decoding it. The encoding is that of protocol buffers (protobuf.dev, "Encoding").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import MAX_CUTS
from kvsidecar.errors import InvalidRequest
from kvsidecar.retained_prefixes import MAX_RETAINED_PREFIXES

from cache_daemon.rpc import request_validation

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
# Default limit of repeated fields, and of non-repeated fields in a message.
_MAX_ELEMENTS = 4096
_SPARE_FIELDS = 256
# Limit of a nested message. A header with the maximal number of tokens needs a fifth of it.
_MAX_NESTED_BYTES = 128 << 10
# Decoding a piece of this length takes a millisecond or two.
MAX_PIECE_BYTES = 256 << 10

_LIMITS: dict[Descriptor, Mapping[str, int]] = {
    pb.MatchRequest.DESCRIPTOR: {
        "token_ids": request_validation.MAX_TOKENS,
        "contents": request_validation.MAX_PROBES,
        "cuts": MAX_CUTS,
        "retained": MAX_RETAINED_PREFIXES,
    },
    pb.ReserveRequest.DESCRIPTOR: {
        "headers": request_validation.MAX_ITEMS,
        "reservation_ids": request_validation.MAX_ITEMS,
        "retained": MAX_RETAINED_PREFIXES,
    },
    pb.CommitRequest.DESCRIPTOR: {"items": request_validation.MAX_ITEMS},
    pb.FetchRequest.DESCRIPTOR: {"prefix_hashes": request_validation.MAX_ITEMS},
    pb.ReleaseRequest.DESCRIPTOR: {"lease_ids": request_validation.MAX_LEASES},
    pb.AbortRequest.DESCRIPTOR: {"reservation_ids": request_validation.MAX_RESERVATIONS},
}


class _Field(NamedTuple):
    """One field occurrence: bytes ``begin`` to ``end`` of the message, of which the value begins at ``value``."""

    number: int
    wire_type: int
    begin: int
    value: int
    end: int


class ElementLimits:
    """Limits of a message type's repeated fields and of its encoding.

    Only the top level is parsed: a nested message may have at most 128 KiB, which bounds its contents.
    """

    def __init__(self, message: Descriptor) -> None:
        most = _LIMITS.get(message, {})
        self._most = {f.number: most.get(f.name, _MAX_ELEMENTS) for f in message.fields if f.is_repeated}
        self._names = {f.number: f.name for f in message.fields}
        self._nested = {f.number for f in message.fields if f.type == FieldDescriptor.TYPE_MESSAGE}
        self._packable = {number for number in self._most if _is_packable(message.fields_by_number[number])}
        repeated = sum(most for number, most in self._most.items() if number not in self._packable)
        self._max_fields = repeated + _SPARE_FIELDS

    def pieces(self, data: bytes) -> Sequence[bytes]:
        """Split a message into pieces of at most 256 KiB, which decode and merge to the message.

        A field of bytes or text stays whole. Raises InvalidRequest beyond a limit, and for an invalid encoding.
        """
        cut, begin, counts = [], 0, dict.fromkeys(self._most, 0)
        for position, field in enumerate(_walk(data)):
            if position >= self._max_fields:
                raise InvalidRequest(
                    f"the message has more than {self._max_fields} fields; repeated numbers must be packed"
                )
            self._check(data, field, counts)
            if field.end - begin <= MAX_PIECE_BYTES:
                continue
            if field.begin > begin:
                cut.append(data[begin : field.begin])
            begin = field.begin
            if field.wire_type == _LENGTH and field.number in self._packable and field.end - begin > MAX_PIECE_BYTES:
                cut += _packed_pieces(data, field)
                begin = field.end
        cut.append(data[begin:])
        return cut

    def _check(self, data: bytes, field: _Field, counts: dict[int, int]) -> None:
        size = field.end - field.value
        if field.number in self._nested and size > _MAX_NESTED_BYTES:
            raise InvalidRequest(
                f"{self._names[field.number]} has a member of {size} bytes; at most {_MAX_NESTED_BYTES} are allowed"
            )
        most = self._most.get(field.number)
        if most is None:
            return
        packed = field.wire_type == _LENGTH and field.number in self._packable
        counts[field.number] += _count(data, field) if packed else 1
        if counts[field.number] > most:
            named = self._names[field.number].replace("contents", "content probes")
            raise InvalidRequest(f"the number of {named} is at least {counts[field.number]}; at most {most} is allowed")


def _is_packable(field: FieldDescriptor) -> bool:
    return field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_ENUM)


def _walk(data: bytes) -> Iterator[_Field]:
    """Yield the fields of an encoded message. Raises InvalidRequest for an invalid encoding."""
    at, size = 0, len(data)
    try:
        while at < size:
            begin = at
            tag, at = _varint(data, at)
            wire_type = tag & 7
            value = at
            if wire_type == _LENGTH:
                length, value = _varint(data, at)
                at = value + length
            elif wire_type == _VARINT:
                _, at = _varint(data, at)
            else:
                at += _FIXED_BYTES[wire_type]
            if at > size:
                raise IndexError(at)
            yield _Field(tag >> 3, wire_type, begin, value, at)
    except (IndexError, KeyError):
        raise InvalidRequest(
            f"the message cannot be decoded as the method's request: no field of protobuf begins at byte {begin}"
        ) from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at a position. Returns its value and its end; raises IndexError."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    found, shift = byte & 0x7F, 7
    for position in range(at + 1, at + _MAX_VARINT_BYTES):
        byte = data[position]
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, position + 1
        shift += 7
    raise IndexError(at)


def _count(data: bytes, field: _Field) -> int:
    """Count the varints of a packed field; each varint ends with a byte below 128."""
    raw = np.frombuffer(data, np.uint8, field.end - field.value, field.value)
    return int(np.count_nonzero(raw < 0x80))


def _packed_pieces(data: bytes, field: _Field) -> Iterator[bytes]:
    """Split a packed field into several, at the ends of varints."""
    tag, _ = _varint(data, field.begin)
    at = field.value
    while at < field.end:
        end = min(at + MAX_PIECE_BYTES - 2 * _MAX_VARINT_BYTES, field.end)
        for _ in range(_MAX_VARINT_BYTES):
            if end == field.end or data[end - 1] < 0x80:
                break
            end -= 1
        yield _encoded(tag) + _encoded(end - at) + data[at:end]
        at = end


def _encoded(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
