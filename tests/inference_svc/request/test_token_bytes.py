"""The bytes of a token, by its name in the vocabulary and its text."""

from __future__ import annotations

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from inference_svc.request.token_bytes import token_bytes


def test_a_byte_level_vocabulary_tells_every_byte() -> None:
    for byte, character in bytes_to_unicode().items():
        assert token_bytes(character, "\ufffd") == bytes([byte])
    encoded = "🦊".encode()
    name = "".join(bytes_to_unicode()[byte] for byte in encoded)
    assert [token_bytes(part, "\ufffd") for part in (name[:3], name[3:])] == [encoded[:3], encoded[3:]]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hello", "hello", b"hello"),
        ("Ġthe", " the", b" the"),
        ("<0xE2>", "\ufffd", b"\xe2"),
        ("\ufffd", "\ufffd", "\ufffd".encode()),  # SentencePiece has the character itself
        ("ï¿½", "\ufffd", "\ufffd".encode()),  # a byte-level BPE has it, too
        ("猫", "\ufffd", b""),  # neither
        ("", "\ufffd", b""),
        ("", "", b""),
    ],
)
def test_other_names(name: str, text: str, found: bytes) -> None:
    assert token_bytes(name, text) == found
