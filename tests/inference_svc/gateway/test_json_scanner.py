"""What bodies are counted as before they are decoded."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar.errors import InvalidRequest

from inference_svc.gateway.json_scanner import MAX_DEPTH, MAX_PARTS, MAX_VALUES, JsonScanner

_TEXTS = st.text(alphabet='ab"\\[]{},:\n\U0001f9a6', max_size=8)
_JSON = st.recursive(
    st.none() | st.integers() | _TEXTS, lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner), max_leaves=30
)


def counted(value: Any) -> tuple[int, int]:
    """Commas and openings, and openings and colons, of the JSON of a value."""
    if not isinstance(value, dict | list):
        return 0, 0
    below = [counted(part) for part in (value.values() if isinstance(value, dict) else value)]
    values = 1 + max(0, len(value) - 1) + sum(v for v, _ in below)
    return values, 1 + (len(value) if isinstance(value, dict) else 0) + sum(p for _, p in below)


def counted_in_parts(raw: bytes, size: int) -> JsonScanner:
    scanner = JsonScanner()
    for at in range(0, len(raw), size):
        scanner.feed(raw[at : at + size])
    return scanner


@given(_JSON, st.booleans(), st.integers(1, 9))
def test_counts_are_those_of_what_is_decoded_however_it_is_cut(value: Any, ascii_alone: bool, size: int) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_alone).encode()
    scanner = counted_in_parts(raw, size)
    assert (scanner.num_values, scanner.num_parts) == counted(value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * (MAX_DEPTH + 1), "nested more than 128 levels deep"),
        (b'{"a":' * (MAX_DEPTH + 1), "nested more than 128 levels deep"),
        (b'["]",' + b"[" * MAX_DEPTH, "nested more than 128 levels deep"),
        (b"[" + b"{}," * MAX_PARTS, "more than 65536 objects, lists and members"),
        (b"{" + b'"a":1,' * MAX_PARTS, "more than 65536 objects, lists and members"),
        (b"[" + b"1," * MAX_VALUES, "more than 262144 values"),
    ],
)
def test_what_is_beyond_a_limit_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        JsonScanner().feed(body)
    with pytest.raises(InvalidRequest, match=said):
        counted_in_parts(body, 1000)


@pytest.mark.parametrize("text", ["[{,:" * 500_000, '"' * 500_000, "\\" * 500_001, "[" * 1000, '\\"[' * 200_000])
def test_what_stands_in_a_text_counts_for_nothing(text: str) -> None:
    scanner = JsonScanner()
    scanner.feed(json.dumps({"prompt": text}).encode())
    assert (scanner.num_values, scanner.num_parts) == (1, 2)


def test_a_part_takes_a_few_ms_at_most() -> None:
    """Of what uvicorn hands on at once, whatever it is: the event loop waits."""
    for part in (b'"' * 65536, b"\\" * 65536, b"[]" * 32768, b"," * 65536, b"x" * 65536, b'{"a":1},' * 8192):
        scanner, began = JsonScanner(), time.thread_time()
        scanner.feed(part)
        assert time.thread_time() - began < 0.02, part[:8]
