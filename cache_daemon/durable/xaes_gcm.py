"""XAES-256-GCM, an AEAD with nonces of 192 bits (https://c2sp.org/XAES-256-GCM).

Each message has its own AES-256-GCM key, derived from the first 96 bits of the nonce (NIST SP 800-108r1 with CMAC); the
other 96 bits are GCM's nonce. Random nonces are safe for 2^80 messages, with AES-256-GCM alone for 2^32.

Imports the package ``cryptography``, which only encrypted stores need.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES, TAG_BYTES = 24, 16
_BLOCK_BYTES, _HALF_BYTES = 16, 12
# The input blocks of the derivation: a counter of 16 bits, the label "X", a zero byte, and half of the nonce.
_FIRST_BLOCK, _SECOND_BLOCK = 0x0001_5800 << 96, 0x0002_5800 << 96


class XaesGcm:
    """AEAD with the methods ``encrypt_into`` and ``decrypt_into`` of ``AESGCM``. Any thread may use it."""

    def __init__(self, key: bytes) -> None:
        # One block at a time: the derivation is CMAC over a single block, so ECB is the block cipher itself.
        self._aes = Cipher(algorithms.AES256(key), modes.ECB())
        doubled = int.from_bytes(self._aes.encryptor().update(bytes(_BLOCK_BYTES))) << 1
        subkey = doubled ^ (0x87 | 1 << 128) if doubled >> 128 else doubled
        self._first, self._second = subkey ^ _FIRST_BLOCK, subkey ^ _SECOND_BLOCK

    def encrypt_into(
        self, nonce: bytes | memoryview, plain: bytes | memoryview, aad: bytes, target: memoryview
    ) -> None:
        """Encrypt ``plain`` into ``target``, which is ``TAG_BYTES`` longer. Raises ValueError."""
        self._message_cipher(nonce).encrypt_into(nonce[_HALF_BYTES:], plain, aad, target)

    def decrypt_into(
        self, nonce: bytes | memoryview, encrypted: bytes | memoryview, aad: bytes, target: memoryview
    ) -> None:
        """Decrypt into ``target``, which is ``TAG_BYTES`` shorter than ``encrypted``. Raises InvalidTag, ValueError."""
        self._message_cipher(nonce).decrypt_into(nonce[_HALF_BYTES:], encrypted, aad, target)

    def _message_cipher(self, nonce: bytes | memoryview) -> AESGCM:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce of {len(nonce)} bytes; XAES-256-GCM takes {NONCE_BYTES}")
        half = int.from_bytes(nonce[:_HALF_BYTES])
        blocks = (self._first ^ half).to_bytes(_BLOCK_BYTES) + (self._second ^ half).to_bytes(_BLOCK_BYTES)
        return AESGCM(self._aes.encryptor().update(blocks))
