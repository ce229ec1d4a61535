"""What a message holds is counted before it is decoded; what passes is the same message in pieces."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import InvalidRequest

from cache_daemon.rpc import request_validation
from cache_daemon.rpc.element_limits import MAX_PIECE_BYTES, ElementLimits
from cache_daemon.rpc.request_decoder import EncodedRequest, RequestDecoder, UndecodableRequest, decode_request

MEBIBYTE = 1 << 20


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


AMPLIFYING: dict[str, tuple[type[Message], bytes, str]] = {
    "headers": (pb.ReserveRequest, b"\x1a\x00", "the number of headers"),
    "reservation ids": (pb.ReserveRequest, b"\x2a\x00", "the number of reservation_ids"),
    "content probes": (pb.MatchRequest, b"\x2a\x00", "the number of content probes"),
    "items": (pb.CommitRequest, b"\x1a\x00", "the number of items"),
    "leases": (pb.ReleaseRequest, b"\x12\x00", "the number of lease_ids"),
    "reservations": (pb.AbortRequest, b"\x12\x00", "the number of reservation_ids"),
    "names": (pb.FetchRequest, b"\x32\x00", "the number of prefix_hashes"),
    "numbers one by one": (pb.MatchRequest, b"\x18\x01", "repeated numbers must be packed"),
    "one field again and again": (pb.CommitRequest, b"\x0a\x00", "the message has more than"),
    "unknown fields": (pb.StatsRequest, b"\x78\x00", "the message has more than"),
}


@pytest.mark.parametrize("name", AMPLIFYING)
def test_too_many_members_are_refused_before_they_are_decoded(name: str) -> None:
    kind, member, named = AMPLIFYING[name]
    body = member * (8 * MEBIBYTE)
    decode = RequestDecoder(kind)
    took = []
    for _ in range(3):  # a collection of garbage may come into one
        began = time.thread_time()
        request = decode(body)
        took.append(time.thread_time() - began)
    assert min(took) < 0.05
    assert isinstance(request, UndecodableRequest)
    assert named in str(request.error)


def test_packed_numbers_are_counted() -> None:
    pieces = ElementLimits(pb.MatchRequest.DESCRIPTOR).pieces
    longest = field(3, b"\xff\xff\x7f" * request_validation.MAX_TOKENS)
    assert pieces(longest)
    with pytest.raises(InvalidRequest, match="the number of token_ids is at least 1048577"):
        pieces(longest + field(3, b"\x01"))
    took, many = [], field(3, bytes(16 * MEBIBYTE))
    for _ in range(3):
        began = time.thread_time()
        with pytest.raises(InvalidRequest, match="the number of token_ids"):
            pieces(many)
        took.append(time.thread_time() - began)
    assert min(took) < 0.05


def test_a_member_that_would_hold_a_whole_message_is_refused() -> None:
    header = field(3, b"\x28\x00" * MEBIBYTE)  # token ids, one by one
    with pytest.raises(InvalidRequest, match="headers has a member of 2097152 bytes; at most 131072"):
        ElementLimits(pb.ReserveRequest.DESCRIPTOR).pieces(header)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x1a\xff", id="a length that does not end"),
        pytest.param(b"\x1a\x05ab", id="a value that does not end"),
        pytest.param(b"\x1b" + b"\x1a\x00" * 100, id="a group"),
        pytest.param(b"\xff" * 12, id="a tag that does not end"),
        pytest.param(b"\x0f\x00", id="a wire type that is none"),
        pytest.param(b"\x09\x00", id="a fixed number that does not end"),
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    long = pb.ReserveRequest(tenant_salt=bytes(20_000)).SerializeToString()
    for data in (body, long + body):
        with pytest.raises(InvalidRequest, match=r"no field of protobuf begins at byte \d+"):
            ElementLimits(pb.ReserveRequest.DESCRIPTOR).pieces(data)
    assert isinstance(RequestDecoder(pb.ReserveRequest)(long + body), UndecodableRequest)


messages = st.builds(
    lambda ids, cuts, probes, salt, session, price: pb.MatchRequest(
        token_ids=ids * 40_000,
        cuts=cuts,
        contents=[pb.ContentProbe(start=s, tokens=t) for s, t in probes],
        tenant_salt=salt,
        session_id=session,
        seconds_per_token=price,
    ),
    st.lists(st.integers(0, 2**32 - 1), max_size=8),
    st.lists(st.integers(0, 2**32 - 1), max_size=20),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=20),
    st.binary(max_size=300),
    st.binary(max_size=20),
    st.floats(0, 100),
)


@given(messages, st.permutations(range(2)))
@settings(max_examples=40, deadline=None)
def test_the_pieces_are_the_message(message: pb.MatchRequest, order: list[int]) -> None:
    halves = [message.SerializeToString(), pb.MatchRequest(window=7).SerializeToString()]
    body = b"".join(halves[i] for i in order)
    merged = pb.MatchRequest()
    for piece in ElementLimits(pb.MatchRequest.DESCRIPTOR).pieces(body):
        assert len(piece) <= MAX_PIECE_BYTES + 400, "a field that cannot be cut ends a piece"
        merged.MergeFromString(piece)
    assert merged == pb.MatchRequest.FromString(body)


async def test_a_large_message_is_decoded_in_pieces() -> None:
    headers = [ChunkHeader(token_ids=range(1 << 20, (1 << 20) + 1024), start_position=n) for n in range(300)]
    whole = pb.ReserveRequest(headers=headers, session_id=b"s" * 16)
    request: Any = RequestDecoder(pb.ReserveRequest)(whole.SerializeToString())
    assert isinstance(request, EncodedRequest)
    assert len(request.pieces) >= 3
    assert await decode_request(request) == whole


async def test_a_piece_that_cannot_be_decoded_is_the_callers_error() -> None:
    header = field(3, b"\x0a\xff")  # a hash that is longer than its header
    request: Any = RequestDecoder(pb.ReserveRequest)(field(2, bytes(300_000)) + header)
    with pytest.raises(InvalidRequest, match="cannot be decoded as the method's request"):
        await decode_request(request)


def test_every_repeated_field_of_a_request_has_a_limit_of_varints_or_members() -> None:
    """``_count`` counts varints; a packed field of fixed length would need another way."""
    for method in pb.DESCRIPTOR.services_by_name["CacheService"].methods:
        for one in method.input_type.fields:
            if one.is_repeated:
                assert one.type in (one.TYPE_UINT32, one.TYPE_BYTES, one.TYPE_MESSAGE), one.full_name


def test_a_refused_message_is_kept_by_nobody() -> None:
    """Tracebacks kept refused messages until the next collection of cycles: 800 MiB in 20 seconds."""
    data = b"\x2a\x00" * 100_000
    before = sys.getrefcount(data)
    refused = RequestDecoder(pb.MatchRequest)(data)
    assert isinstance(refused, UndecodableRequest)
    assert sys.getrefcount(data) == before
