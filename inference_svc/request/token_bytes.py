"""Bytes of a token's text, also of a token that is a part of a character."""

from __future__ import annotations

import re
from functools import cache

from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(name: str, text: str) -> bytes:
    """Return the UTF-8 bytes of a token. ``name`` is its name in the vocabulary, and ``text`` its decoded text.

    A token that is a part of a character decodes to a replacement character. Its bytes are those that its name stands
    for: of SentencePiece's byte tokens (``<0xE2>``), or of a byte-level BPE, which writes each byte as a character.
    Returns no bytes if the name tells neither.
    """
    if REPLACEMENT not in text:
        return text.encode()
    fallback = _BYTE_FALLBACK.fullmatch(name)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    values = _values_of_characters()
    if name and all(character in values for character in name):
        return bytes(values[character] for character in name)
    return text.encode() if REPLACEMENT in name else b""


@cache
def _values_of_characters() -> dict[str, int]:
    """Map the characters in names of a byte-level BPE to byte values."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
