"""Encryption at rest: AES-256-GCM over headers, notes and payloads (NIST SP 800-38D).

Every value has its own random nonce of 96 bits. Its associated data names its database and key, so an attacker cannot
exchange two values. Database keys are not encrypted: they are hashes, and reveal nothing to a reader who cannot guess
the tokens. Encryption follows compression, because encrypted bytes do not compress.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import string
from pathlib import Path
from typing import Any, Protocol

from kvsidecar.errors import ConfigurationError

KEY_BYTES = 32
_PRINTABLE = frozenset(string.printable.encode())
_NONCE_BYTES, _TAG_BYTES, _SALT_BYTES = 12, 16, 16


class DecryptError(Exception):
    """The value was not encrypted with this key for this database and key."""


class Cipher(Protocol):
    """Protection of stored values.

    ``place`` (database name and key) is authenticated with the value.
    """

    overhead: int

    def encrypt(self, place: bytes, plain: bytes | memoryview) -> bytes | memoryview: ...

    def decrypt(self, place: bytes, encrypted: memoryview, target: memoryview) -> None:
        """Fill ``target``, ``overhead`` bytes shorter than ``encrypted``. Raises DecryptError."""
        ...

    def new_key_check(self) -> bytes:
        """Return a new record for the store that ``matches`` accepts with this key."""
        ...

    def matches(self, check: bytes) -> bool: ...


class NullCipher:
    """No encryption: values are stored unchanged."""

    overhead = 0

    def encrypt(self, place: bytes, plain: bytes | memoryview) -> bytes | memoryview:
        return plain

    def decrypt(self, place: bytes, encrypted: memoryview, target: memoryview) -> None:
        target[:] = encrypted

    def new_key_check(self) -> bytes:
        return b"none"

    def matches(self, check: bytes) -> bool:
        return check == b"none"


class AesGcmCipher:
    """AES-256-GCM.

    Raises ConfigurationError for a key of another length, or without the package ``cryptography``.
    """

    overhead = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigurationError(f"the store's key has {len(key)} bytes; AES-256 takes {KEY_BYTES}")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigurationError(
                "an encrypted store needs the package 'cryptography'; pip install 'kvsidecar[encryption]'"
            ) from error
        self._key, self._cipher, self._refused = key, AESGCM(key), InvalidTag

    def encrypt(self, place: bytes, plain: bytes | memoryview) -> bytes | memoryview:
        encrypted = bytearray(len(plain) + self.overhead)
        encrypted[:_NONCE_BYTES] = os.urandom(_NONCE_BYTES)
        whole = memoryview(encrypted)
        self._cipher.encrypt_into(whole[:_NONCE_BYTES], plain, place, whole[_NONCE_BYTES:])
        return whole

    def decrypt(self, place: bytes, encrypted: memoryview, target: memoryview) -> None:
        try:
            self._cipher.decrypt_into(encrypted[:_NONCE_BYTES], encrypted[_NONCE_BYTES:], place, target)
        except (self._refused, ValueError) as error:
            raise DecryptError(
                f"a value of {len(encrypted)} bytes is not sealed for this place with this key"
            ) from error

    def new_key_check(self) -> bytes:
        salt = os.urandom(_SALT_BYTES)
        return salt + self._digest(salt)

    def matches(self, check: bytes) -> bool:
        return hmac.compare_digest(check[_SALT_BYTES:], self._digest(check[:_SALT_BYTES]))

    def _digest(self, salt: bytes) -> bytes:
        return hmac.digest(self._key, b"kvsidecar store key" + salt, hashlib.sha256)


def cipher_for(key: bytes | None) -> Cipher:
    """Return the cipher for a key; None is no encryption. Raises ConfigurationError."""
    return NullCipher() if key is None else AesGcmCipher(key)


def parse_key(text: bytes, source: str) -> bytes:
    """Parse 32 raw bytes, or 64 hexadecimal digits. Raises ConfigurationError.

    32 printable characters are refused as a raw key: they are half of the digits, or a password with fewer than 256
    random bits.
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
    """Return the key of an environment variable (hex digits), or None. Raises ConfigurationError."""
    text = os.environ.get(name)
    return None if text is None else parse_key(text.encode(), f"the environment variable {name}")
