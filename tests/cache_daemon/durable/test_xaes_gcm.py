"""XAES-256-GCM against the test vectors of its specification, https://c2sp.org/XAES-256-GCM."""

from __future__ import annotations

import hashlib
import os

import pytest

pytest.importorskip("cryptography")
from cryptography.exceptions import InvalidTag

from cache_daemon.durable.xaes_gcm import NONCE_BYTES, TAG_BYTES, XaesGcm

NONCE, PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWX", b"XAES-256-GCM"


def encrypt(key: bytes, nonce: bytes, plain: bytes, aad: bytes) -> bytes:
    target = bytearray(len(plain) + TAG_BYTES)
    XaesGcm(key).encrypt_into(nonce, plain, aad, memoryview(target))
    return bytes(target)


@pytest.mark.parametrize(
    ("key", "aad", "expected"),
    [
        (b"\x01", b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (b"\x03", b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
    ids=["highest bit of L is 0", "highest bit of L is 1"],
)
def test_vectors_of_the_specification(key: bytes, aad: bytes, expected: str) -> None:
    encrypted = encrypt(key * 32, NONCE, PLAIN, aad)
    assert encrypted.hex() == expected
    target = bytearray(len(PLAIN))
    XaesGcm(key * 32).decrypt_into(NONCE, encrypted, aad, memoryview(target))
    assert target == PLAIN


def test_accumulated_vector_of_the_specification() -> None:
    """Keys, nonces, lengths and texts of 10,000 messages from one SHAKE128."""
    stream, at = hashlib.shake_128().digest(8_000_000), 0

    def draw(length: int) -> bytes:
        nonlocal at
        at += length
        return stream[at - length : at]

    digest = hashlib.shake_128()
    for _ in range(10_000):
        key, nonce = draw(32), draw(NONCE_BYTES)
        plain = draw(draw(1)[0])
        digest.update(encrypt(key, nonce, plain, draw(draw(1)[0])))
    assert at < len(stream)
    assert digest.hexdigest(32) == "e6b9edf2df6cec60c8cbd864e2211b597fb69a529160cd040d56c0c210081939"


def test_every_flipped_bit_is_noticed() -> None:
    key, aad = os.urandom(32), b"place"
    whole = NONCE + encrypt(key, NONCE, PLAIN, aad)
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidTag):
            XaesGcm(key).decrypt_into(
                bytes(broken[:NONCE_BYTES]), bytes(broken[NONCE_BYTES:]), aad, memoryview(bytearray(len(PLAIN)))
            )


@pytest.mark.parametrize("changed", [0, 11, 12, 23])
def test_each_byte_of_the_nonce_counts(changed: int) -> None:
    other = bytearray(NONCE)
    other[changed] ^= 1
    assert encrypt(b"k" * 32, bytes(other), PLAIN, b"") != encrypt(b"k" * 32, NONCE, PLAIN, b"")


@pytest.mark.parametrize("length", [12, 23, 25])
def test_a_nonce_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"nonce of {length} bytes; XAES-256-GCM takes 24"):
        encrypt(b"k" * 32, bytes(length), PLAIN, b"")
