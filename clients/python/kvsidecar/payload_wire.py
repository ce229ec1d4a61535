"""Wire format of Fetch messages, without protobuf's two extra copies at each end.

A FetchResponse that contains only ``data`` is the tag of field 2 (length-delimited), the length as a varint, and the
bytes (https://protobuf.dev/programming-guides/encoding). Any protobuf library reads and writes the same.
"""

from __future__ import annotations

from kvsidecar.cache.v1.cache_pb2 import FetchResponse

_TAG = (FetchResponse.DATA_FIELD_NUMBER << 3 | 2).to_bytes(1)
_MOST_LENGTH_BYTES = 5


def encode_data(payload: memoryview) -> bytes:
    """Serialize ``FetchResponse(data=payload)``."""
    length, rest = bytearray(), len(payload)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return b"".join((_TAG, length, payload))


def decode_message(message: bytes) -> memoryview | FetchResponse:
    """Return the data of a data-only message without a copy, else the decoded message.

    Raises DecodeError.
    """
    if message[:1] == _TAG:
        length = 0
        for at, byte in enumerate(message[1 : 1 + _MOST_LENGTH_BYTES]):
            length |= (byte & 0x7F) << (7 * at)
            if byte < 0x80:
                view = memoryview(message)[at + 2 :]
                if len(view) == length:
                    return view
                break
    return FetchResponse.FromString(message)
