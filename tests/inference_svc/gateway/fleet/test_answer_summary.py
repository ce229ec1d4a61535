"""Summaries of answers between gateways."""

from __future__ import annotations

from typing import Any

import pytest

from inference_svc.gateway.answer_summary import SummaryFilter, parse_summary, summary_comment

EVENTS = b': ping\n\ndata: {"text": ": kvsidecar-summary {}"}\n\ndata: [DONE]\n\n'
FIELDS: dict[str, Any] = {"model": "m", "prompt_tokens": 7, "ttft_ms": 1.5}


@pytest.mark.parametrize("size", range(1, 60))
def test_the_summary_is_removed_however_the_bytes_are_cut(size: int) -> None:
    sent, found, passed = EVENTS + summary_comment(FIELDS | {"error": "NOT_SENT"}), SummaryFilter(), b""
    for at in range(0, len(sent), size):
        piece = sent[at : at + size]
        passed += found.feed(piece)
        if piece.endswith(b"\n") and at + size < len(EVENTS):
            assert passed == sent[: at + size], "an event is passed on as soon as it is whole"
    assert (passed + found.rest(), found.fields) == (EVENTS, FIELDS)


def test_a_stream_without_a_summary_stays_as_it_is() -> None:
    found = SummaryFilter()
    assert found.feed(b"data: one\n\n: kvsidecar-sum") + found.rest() == b"data: one\n\n: kvsidecar-sum"


@pytest.mark.parametrize(
    "data", [b"", b"[1]", b"{", b'{"model": 3, "answers": "x"}', b"[" * 4000, b'{"model": "' + b"x" * 5000 + b'"}']
)
def test_garbage_is_no_summary(data: bytes) -> None:
    assert parse_summary(data) == {}
