"""Encryption at rest: XAES-256-GCM over headers, notes and payloads (``xaes_gcm.py``).

An encrypted value is the mark ``XAES256G``, a random nonce of 192 bits, the ciphertext and a tag of 16 bytes. Earlier
versions wrote AES-256-GCM (NIST SP 800-38D): a random nonce of 96 bits, ciphertext and tag. Such values stay readable.

The associated data of a value names its database and key, so an attacker cannot exchange two values. Database keys are
not encrypted: they are hashes, and reveal nothing to a reader who cannot guess the tokens. Encryption follows
compression, because encrypted bytes do not compress.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvsidecar.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from cache_daemon.durable.xaes_gcm import XaesGcm

KEY_BYTES = 32
_PRINTABLE = frozenset(string.printable.encode())
_SALT_BYTES = 16
# The nonce of an AES-GCM value begins with the mark once in 2^64 values; such a value counts as corrupt.
_MARK = b"XAES256G"
_XAES_NONCE_BYTES, _AES_NONCE_BYTES, _TAG_BYTES = 24, 12, 16
_XAES_NONCE, _AES_NONCE = slice(len(_MARK), len(_MARK) + _XAES_NONCE_BYTES), slice(0, _AES_NONCE_BYTES)


class DecryptError(Exception):
    """The value was not encrypted with this key for this database and key."""


class Cipher(Protocol):
    """Protection of stored values.

    ``place`` (database name and key) is authenticated with the value. ``max_overhead`` is the maximal number of bytes
    that encryption adds, in this or an earlier version; 0 without encryption.
    """

    max_overhead: int

    def encrypt(self, place: bytes, plain: bytes | memoryview) -> bytes | memoryview: ...

    def decrypt(self, place: bytes, encrypted: memoryview, target: memoryview) -> None:
        """Fill ``target``, which has the value's ``plain_length``. Raises DecryptError."""
        ...

    def plain_length(self, encrypted: bytes | memoryview) -> int:
        """Return the decrypted length of a value. Raises DecryptError when it is too short."""
        ...

    def new_key_check(self) -> bytes:
        """Return a new check record for the store; ``matches`` accepts it only with the same key."""
        ...

    def matches(self, check: bytes) -> bool: ...


class NullCipher:
    """No encryption: values are stored unchanged."""

    max_overhead = 0

    def encrypt(self, place: bytes, plain: bytes | memoryview) -> bytes | memoryview:
        return plain

    def decrypt(self, place: bytes, encrypted: memoryview, target: memoryview) -> None:
        target[:] = encrypted

    def plain_length(self, encrypted: bytes | memoryview) -> int:
        return len(encrypted)

    def new_key_check(self) -> bytes:
        return b"none"

    def matches(self, check: bytes) -> bool:
        return check == b"none"


class XaesGcmCipher:
    """Encrypts with XAES-256-GCM; decrypts XAES-256-GCM and AES-256-GCM.

    Raises ConfigurationError for a key of another length, or without the package ``cryptography``.
    """

    max_overhead = _XAES_NONCE.stop + _TAG_BYTES

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigurationError(f"the store's key has {len(key)} bytes; AES-256 takes {KEY_BYTES}")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            from cache_daemon.durable.xaes_gcm import XaesGcm
        except ImportError as error:
            raise ConfigurationError(
                "an encrypted store needs the package 'cryptography'; pip install 'kvsidecar[encryption]'"
            ) from error
        # The two algorithms must not share a key.
        xaes_key = hmac.digest(key, b"kvsidecar store XAES-256-GCM", hashlib.sha256)
        self._key, self._xaes, self._aes, self._refused = key, XaesGcm(xaes_key), AESGCM(key), InvalidTag

    def encrypt(self, place: bytes, plain: bytes | memoryview) -> bytes | memoryview:
        encrypted = memoryview(bytearray(len(plain) + self.max_overhead))
        nonce = os.urandom(_XAES_NONCE_BYTES)
        encrypted[: _XAES_NONCE.stop] = _MARK + nonce
        self._xaes.encrypt_into(nonce, plain, place, encrypted[_XAES_NONCE.stop :])
        return encrypted

    def decrypt(self, place: bytes, encrypted: memoryview, target: memoryview) -> None:
        aead, nonce = self._format_of(encrypted)
        try:
            aead.decrypt_into(encrypted[nonce], encrypted[nonce.stop :], place, target)
        except (self._refused, ValueError) as error:
            raise DecryptError(
                f"a value of {len(encrypted)} bytes is not sealed for this place with this key"
            ) from error

    def plain_length(self, encrypted: bytes | memoryview) -> int:
        length: int = len(encrypted) - self._format_of(encrypted)[1].stop - _TAG_BYTES
        if length < 0:
            raise DecryptError(f"a value of {len(encrypted)} bytes is too short")
        return length

    def _format_of(self, encrypted: bytes | memoryview) -> tuple[AESGCM | XaesGcm, slice]:
        """Return the algorithm of a value and the position of its nonce."""
        if encrypted[: len(_MARK)] == _MARK:
            return self._xaes, _XAES_NONCE
        return self._aes, _AES_NONCE

    def new_key_check(self) -> bytes:
        salt = os.urandom(_SALT_BYTES)
        return salt + self._digest(salt)

    def matches(self, check: bytes) -> bool:
        return hmac.compare_digest(check[_SALT_BYTES:], self._digest(check[:_SALT_BYTES]))

    def _digest(self, salt: bytes) -> bytes:
        return hmac.digest(self._key, b"kvsidecar store key" + salt, hashlib.sha256)


def cipher_for(key: bytes | None) -> Cipher:
    """Return the cipher for a key; None is no encryption. Raises ConfigurationError."""
    return NullCipher() if key is None else XaesGcmCipher(key)


def parse_key(text: bytes, source: str) -> bytes:
    """Parse 32 raw bytes, or 64 hexadecimal digits. Raises ConfigurationError.

    Refuses a raw key of 32 printable characters: it is either half of a hexadecimal key, or a password with fewer than
    256 random bits.
    """
    if len(text) == KEY_BYTES and not all(byte in _PRINTABLE for byte in text):
        return text
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigurationError(
            f"{source} holds no key: it must be {KEY_BYTES} random bytes, or {2 * KEY_BYTES} hex digits; "
            f"openssl rand -hex {KEY_BYTES} makes one"
        )
    return key


def key_from_file(path: Path) -> bytes:
    """Read a key file that only its owner may read. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            mode: Any = os.fstat(file.fileno()).st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise ConfigurationError(f"{path} has mode {stat.S_IMODE(mode):o}; a key must be private: chmod 600")
            return parse_key(file.read(4096), str(path))
    except OSError as error:
        raise ConfigurationError(f"cannot read the store's key: {error}") from error


def key_from_environment(name: str) -> bytes | None:
    """Return the key of an environment variable (hex digits); None if unset or empty. Raises ConfigurationError."""
    text = os.environ.get(name)
    return parse_key(text.encode(), f"the environment variable {name}") if text else None
