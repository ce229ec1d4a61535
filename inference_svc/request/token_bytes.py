"""Bytes of a token's text, also of a token that is a part of a character."""

from __future__ import annotations

import re
from functools import cache

_REPLACEMENT = "\ufffd"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(name: str, text: str) -> bytes:
    """Return the UTF-8 bytes of a token. ``name`` is its name in the vocabulary, and ``text`` its decoded text.

    A token that is a part of a character decodes to a replacement character. Its bytes are those that its name stands
    for: of SentencePiece's byte tokens (``<0xE2>``), or of a byte-level BPE, which writes each byte as a character.
    Returns no bytes if the name tells neither.
    """
    if _REPLACEMENT not in text:
        return text.encode()
    fallback = _BYTE_FALLBACK.fullmatch(name)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    values = _values_of_characters()
    if name and all(character in values for character in name):
        return bytes(values[character] for character in name)
    return text.encode() if _REPLACEMENT in name else b""


@cache
def _values_of_characters() -> dict[str, int]:
    """Map the characters in names of a byte-level BPE to byte values.

    GPT-2's encoding: printable characters of Latin-1 stand for themselves, and the other bytes, in order, for the
    characters from U+0100 on.
    """
    themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in themselves)
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
