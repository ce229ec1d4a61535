"""Cipher of the previous version: AES-256-GCM with random nonces of 96 bits."""

from __future__ import annotations

import os

from cache_daemon.durable.encryption import DecryptError, XaesGcmCipher

_NONCE_BYTES, _TAG_BYTES = 12, 16


class AesGcmCipher(XaesGcmCipher):
    """Encrypts and decrypts values in the format of the previous version: nonce, ciphertext, tag."""

    max_overhead = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._refused = AESGCM(key), InvalidTag

    def encrypt(self, place: bytes, plain: bytes | memoryview) -> memoryview:
        encrypted = memoryview(bytearray(len(plain) + self.max_overhead))
        encrypted[:_NONCE_BYTES] = os.urandom(_NONCE_BYTES)
        self._cipher.encrypt_into(encrypted[:_NONCE_BYTES], plain, place, encrypted[_NONCE_BYTES:])
        return encrypted

    def plain_length(self, encrypted: bytes | memoryview) -> int:
        return max(0, len(encrypted) - self.max_overhead)

    def decrypt(self, place: bytes, encrypted: memoryview, target: memoryview) -> None:
        try:
            self._cipher.decrypt_into(encrypted[:_NONCE_BYTES], encrypted[_NONCE_BYTES:], place, target)
        except (self._refused, ValueError) as error:
            raise DecryptError("not sealed with this key") from error
