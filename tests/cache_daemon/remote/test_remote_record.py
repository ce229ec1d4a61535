"""Round trips of records and payloads, and rejection of all others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from kvsidecar import keys
from kvsidecar.chunk_layout import Geometry, new_header

from cache_daemon.durable import payload_codec
from cache_daemon.durable.encryption import Cipher, NullCipher, XaesGcmCipher
from cache_daemon.durable.record_format import encode_expiry
from cache_daemon.remote.remote_record import (
    InvalidRecord,
    RemoteRecord,
    decode_payload,
    decode_record,
    encode_payload,
    encode_record,
    record_epoch_of,
)
from tests.cache_daemon.conftest import GEOMETRY, payload_of
from tests.cache_daemon.durable.aes_gcm_cipher import AesGcmCipher

IDS = list(range(20))
NAME = "p/1.2/root/hash/head"
CIPHERS = {"plain": NullCipher(), "sealed": XaesGcmCipher(b"k" * 32)}


def chunk(compressible: bool = True) -> tuple[RemoteRecord, bytes, memoryview]:
    """Create a record without a payload, the payload, and a buffer for it."""
    root = keys.tenant_root(b"n" * 32, b"salt")
    header = new_header(GEOMETRY, IDS, 0)
    header.root = header.parent_prefix_hash = root
    header.tenant = keys.tenant_id(b"salt")
    header.prefix_hash, header.content_hash = keys.prefix_hash(root, IDS), keys.content_hash(root, IDS)
    size = header.payload_bytes
    payload = payload_of(IDS, size) if compressible else random.Random(1).randbytes(size)
    header.checksum = keys.checksum(payload)
    return RemoteRecord(header, 0, 1, 0, 0, 0, record_epoch_of(None, b"m") or b""), payload, memoryview(bytearray(size))


def stored(cipher: Cipher, compressible: bool, compress: bool = True) -> tuple[RemoteRecord, bytes, bytes, memoryview]:
    entry, payload, place = chunk(compressible)
    kind, bytes_ = encode_payload(
        cipher, entry.header, memoryview(payload), payload_codec.PlaneCompressor() if compress else None
    )
    whole = RemoteRecord(entry.header, kind, 1, len(bytes_), keys.checksum(bytes_), 77, entry.epoch)
    return whole, payload, bytes(bytes_), place


@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("compressible", [True, False])
@pytest.mark.parametrize("compress", [True, False])
def test_what_was_written_comes_back(cipher: str, compressible: bool, compress: bool) -> None:
    entry, payload, bytes_, place = stored(CIPHERS[cipher], compressible, compress)
    assert (len(bytes_) < len(payload)) == (compressible and compress)
    assert decode_record(CIPHERS[cipher], NAME, encode_record(CIPHERS[cipher], NAME, entry)) == entry
    third = len(bytes_) // 3
    decode_payload(CIPHERS[cipher], entry, [bytes_[:third], bytes_[third:]], place)
    assert place == payload


@pytest.mark.parametrize("cipher", CIPHERS)
def test_no_flipped_bit_of_a_record_goes_unseen(cipher: str) -> None:
    entry, *_ = stored(CIPHERS[cipher], True)
    record = encode_record(CIPHERS[cipher], NAME, entry)
    for at in range(len(record)):
        broken = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
        with pytest.raises(InvalidRecord):
            decode_record(CIPHERS[cipher], NAME, broken)
    for length in range(len(record)):
        with pytest.raises(InvalidRecord):
            decode_record(CIPHERS[cipher], NAME, record[:length])


@pytest.mark.parametrize("cipher", CIPHERS)
def test_no_flipped_byte_of_a_payload_goes_unseen(cipher: str) -> None:
    entry, _, bytes_, place = stored(CIPHERS[cipher], True)
    for at in range(0, len(bytes_), 7):
        with pytest.raises(InvalidRecord):
            decode_payload(CIPHERS[cipher], entry, [bytes_[:at] + bytes([bytes_[at] ^ 1]) + bytes_[at + 1 :]], place)
    for parts in ([], [b""], [bytes_[:-1]], [bytes_, b"\0"]):
        with pytest.raises(InvalidRecord):
            decode_payload(CIPHERS[cipher], entry, parts, place)


def test_a_record_is_of_its_name_alone() -> None:
    entry, *_ = stored(NullCipher(), True)
    with pytest.raises(InvalidRecord):
        decode_record(NullCipher(), NAME.replace("hash", "other"), encode_record(NullCipher(), NAME, entry))


@pytest.mark.parametrize("ends_at", [(1 << 64) - 1, 1 << 62, 1 << 40])
def test_a_record_that_ends_in_no_time_is_not_believed(ends_at: int) -> None:
    """Its chunk's end, in milliseconds, could be noted nowhere, and with it nobody else's."""
    entry, *_ = stored(NullCipher(), True)
    for good in (0, 77, (1 << 40) - 1):
        assert (
            decode_record(
                NullCipher(), NAME, encode_record(NullCipher(), NAME, replace(entry, expires_at=good))
            ).expires_at
            == good
        )
    encode_expiry(float((1 << 40) - 1))
    with pytest.raises(InvalidRecord, match="no time"):
        decode_record(NullCipher(), NAME, encode_record(NullCipher(), NAME, replace(entry, expires_at=ends_at)))


@pytest.mark.parametrize(("writer", "reader"), [("plain", "sealed"), ("sealed", "plain"), ("sealed", "other")])
def test_another_key_reads_nothing_and_damages_nothing(writer: str, reader: str) -> None:
    seals = {**CIPHERS, "other": XaesGcmCipher(b"o" * 32)}
    entry, _, bytes_, place = stored(seals[writer], True)
    with pytest.raises(InvalidRecord) as caught:
        decode_record(seals[reader], NAME, encode_record(seals[writer], NAME, entry))
    assert not caught.value.corrupt, "it may be another fleet's"
    if reader != "plain":
        with pytest.raises(InvalidRecord):
            decode_payload(seals[reader], entry, [bytes_], place)


@pytest.mark.parametrize("compress", [True, False])
def test_records_of_the_previous_version_stay_readable(compress: bool) -> None:
    old, new = AesGcmCipher(b"k" * 32), XaesGcmCipher(b"k" * 32)
    entry, payload, bytes_, place = stored(old, compress, compress)
    assert decode_record(new, NAME, encode_record(old, NAME, entry)) == entry
    decode_payload(new, entry, [bytes_], place)
    assert place == payload


@pytest.mark.parametrize("compress", [True, False])
def test_the_previous_version_leaves_new_records_alone(compress: bool) -> None:
    old, new = AesGcmCipher(b"k" * 32), XaesGcmCipher(b"k" * 32)
    entry, _, bytes_, place = stored(new, compress, compress)
    with pytest.raises(InvalidRecord) as caught:
        decode_record(old, NAME, encode_record(new, NAME, entry))
    assert not caught.value.corrupt, "newer nodes can read it"
    with pytest.raises(InvalidRecord):
        decode_payload(old, entry, [bytes_], place)


def lied(**changed: object) -> bytes:
    """Encode an intact record of a wrong header."""
    entry, *_ = stored(NullCipher(), True)
    for field, value in changed.items():
        if field == "token_ids":
            entry.header.ClearField("token_ids")
            entry.header.token_ids.extend(value)  # type: ignore[arg-type]
        else:
            setattr(entry.header, field, value)
    return encode_record(NullCipher(), NAME, entry)


@pytest.mark.parametrize(
    "changed",
    [
        {"format_version": keys.FORMAT_VERSION + 1},
        {"prefix_hash": b"x" * 32},
        {"content_hash": b"x" * 32},
        {"parent_prefix_hash": b"x" * 32},
        {"token_ids": IDS[::-1]},
        {"token_count": 3},
        {"layers": 99},
        {"layers": 0},
        {"payload_bytes": 1 << 60},
        {"bits": 5},
        {"prefill_seconds": float("nan")},
    ],
    ids=str,
)
def test_a_header_that_lies_is_not_believed(changed: dict[str, object]) -> None:
    with pytest.raises(InvalidRecord):
        decode_record(NullCipher(), NAME, lied(**changed))


def test_a_record_cannot_ask_for_much_memory() -> None:
    entry, *_ = stored(NullCipher(), True)
    for parts, length in ((4097, 10), (0, 10), (1, 1 << 40), (2, 0), (4096, 0), (1, 0), (2, 1), (4096, 4095)):
        with pytest.raises(InvalidRecord):
            decode_record(
                NullCipher(),
                NAME,
                encode_record(NullCipher(), NAME, RemoteRecord(entry.header, 0, parts, length, 0, 0, entry.epoch)),
            )  # fmt: skip


def test_marks_are_of_both() -> None:
    assert len({record_epoch_of(a, b) for a in (None, b"1", b"12") for b in (b"", b"2", b"12")}) == 9
    assert record_epoch_of(None, None) is record_epoch_of(b"1", None) is None, "without a tenant's, nothing counts"
    assert Geometry.of(chunk()[0].header) == GEOMETRY
