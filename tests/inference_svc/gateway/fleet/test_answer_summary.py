"""Summaries of answers between gateways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_svc.gateway.answer_summary import SummaryFilter, parse_summary, summary_comment, summary_of
from tests.inference_svc.gateway.fleet.peers import fleet_of
from tests.inference_svc.gateway.http_server import listening
from tests.inference_svc.gateway.test_worker_wait import Worker

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


def test_a_summary_is_small_whatever_the_texts() -> None:
    fields = parse_summary(summary_of(FIELDS | {"model": "m" * 300_000}))
    assert fields == FIELDS | {"model": "m" * 200}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_node_refuses_the_name_of_a_model_that_is_very_long(tmp_path: Path, path: str) -> None:
    """With --claude-names, any name that begins with claude- names the served model, and answers repeat it."""
    worker = Worker(tmp_path / "0")
    await worker.start()
    said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    said = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, said)
    try:
        async with (
            listening(workers=str(worker.target), claude_names=True) as (port, _),
            fleet_of(nodes=f"http://127.0.0.1:{port}") as (client, fleet),
        ):
            for name, code in (("claude-" + "x" * 300_000, 400), ("claude-" + "x" * 249, 200)):
                answer = await client.post(path, json={"model": name, **said}, timeout=30)
                assert answer.status_code == code, answer.text[:300]
                assert ("model has 300007 characters; at most 256 are allowed" in answer.text) == (code == 400)
                assert fleet.discovery.alive
    finally:
        await worker.stop()
