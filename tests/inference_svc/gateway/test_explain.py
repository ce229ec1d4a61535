"""``explain``: which parts of a prompt had been read before, over gRPC and HTTP, with texts that join to the prompt."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar.inference.v1 import inference_pb2 as pb
from transformers import AutoTokenizer

from benchmarks.node import Node
from inference_svc.context_reuse.reuse_plan import RelocatedSpan, ReusePlan
from inference_svc.context_reuse.token_provenance import Provenance, provenance_spans
from inference_svc.models.loader import DEMO_MODEL
from inference_svc.sequence.detokenizer import split_text
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.gateway.conftest import Gateway

TOKENIZER = AutoTokenizer.from_pretrained(DEMO_MODEL)
WORDS = "the quick brown fox reads a long page about caches, über Größe, and 日本語 🦊 too. "


def ask(gateway: Gateway, text: str, **options: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "explain": True, **options}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def rendered(gateway: Gateway, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    tokens = httpx.post(f"{gateway.url}/tokenize", json=body).json()["tokens"]
    return str(httpx.post(f"{gateway.url}/detokenize", json={"tokens": tokens}).json()["prompt"])


def readings(answer: dict[str, Any]) -> dict[str, int]:
    out: dict[str, int] = {}
    for part in answer["prompt_parts"]:
        out[part["reading"]] = out.get(part["reading"], 0) + part["tokens"]
    return out


def test_what_was_read_before_is_told_and_joins_to_the_prompt(gateway: Gateway, node: Node) -> None:
    text = "told. " + WORDS * 6
    first = ask(gateway, text)
    assert readings(first) == {"computed": first["usage"]["prompt_tokens"]}
    numerics = node.client().model().numerics
    assert len(numerics.id) == 16
    assert first["numerics"] == {"id": numerics.id, "shared_across_machines": False}
    worker = httpx.get(f"{gateway.url}/kvsidecar/v1/node").json()["workers"][0]
    assert first["reuse_anywhere"] == {"on": True, "verified": True, "sentence": worker["reuse_anywhere"]}
    assert "is on without a verification" in worker["reuse_anywhere"]
    again = ask(gateway, text)
    assert [part["reading"] for part in again["prompt_parts"]] == ["exact", "computed"]
    assert readings(again)["exact"] == again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert "".join(part["text"] for part in again["prompt_parts"]) == rendered(gateway, text)


def test_another_salt_is_told_nothing_of_it(gateway: Gateway) -> None:
    text = "secret of one tenant. " + WORDS * 6
    ask(gateway, text, cache_salt="one")
    assert set(readings(ask(gateway, text, cache_salt="one"))) == {"exact", "computed"}
    assert set(readings(ask(gateway, text, cache_salt="two"))) == {"computed"}


def test_skipping_the_cache_reads_and_stores_nothing(gateway: Gateway) -> None:
    text = "skipped. " + WORDS * 6
    ask(gateway, text, skip_cache=True)
    assert set(readings(ask(gateway, text))) == {"computed"}
    assert set(readings(ask(gateway, text, skip_cache=True))) == {"computed"}


def test_a_stream_tells_before_its_first_word(gateway: Gateway) -> None:
    stream = gateway.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "streamed"}], max_tokens=3, stream=True,
        extra_body={"explain": True},
    )  # fmt: skip
    events = list(stream)
    at = next(i for i, event in enumerate(events) if getattr(event, "prompt_parts", None))
    assert not any(c.delta.content for event in events[:at] for c in event.choices)
    assert "streamed" in "".join(part["text"] for part in events[at].prompt_parts)


def test_a_response_tells_too_whole_and_from_its_first_event(gateway: Gateway) -> None:
    text = "responded. " + WORDS * 6
    options: Any = {"model": "demo", "input": text, "max_output_tokens": 2, "extra_body": {"explain": True}}
    whole = gateway.client.responses.create(**options).model_dump()
    assert [part["reading"] for part in whole["prompt_parts"]] == ["computed"]
    assert whole["prompt_parts"][0]["tokens"] == whole["usage"]["input_tokens"]
    first, *_, last = gateway.client.responses.create(stream=True, **options)
    assert first.type == "response.created"
    told = first.response.model_dump()["prompt_parts"]
    assert [part["reading"] for part in told] == ["exact", "computed"]
    assert "".join(part["text"] for part in told) == rendered(gateway, text)
    assert last.response.model_dump()["prompt_parts"] == told
    kept = gateway.client.responses.retrieve(whole["id"]).model_dump()
    assert kept["prompt_parts"] == whole["prompt_parts"]
    assert (
        "prompt_parts" not in gateway.client.responses.create(model="demo", input="x", max_output_tokens=1).model_dump()
    )


def test_it_is_for_one_answer_and_only_on_request(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="explain is for one answer"):
        gateway.client.completions.create(model="demo", prompt="x", n=2, extra_body={"explain": True})
    answer = gateway.client.completions.create(model="demo", prompt="x", max_tokens=1)
    assert getattr(answer, "prompt_parts", None) is None


def test_moved_and_repaired_text_over_grpc(two: Node) -> None:
    client = two.client()
    a, b, c = ([7, *prompt(4400 + i, 90)] for i in range(3))
    client.generate([1, *a, *b, *c], max_tokens=1, document_separator="<|doc|>")
    two.settle()
    ids = [1, *b, *a, *c, 7, *prompt(4409, 12)]
    found = client.generate(ids, max_tokens=1, explain=True, document_separator="<|doc|>")
    sums = {kind: sum(p.tokens for p in found.prompt_parts if p.reading == kind) for kind in pb.Reading.values()}
    assert found.approximate_tokens > found.recomputed_tokens > 0
    assert sums[pb.READING_REPAIRED] == found.recomputed_tokens
    assert sums[pb.READING_MOVED] == found.approximate_tokens - found.recomputed_tokens
    assert sums[pb.READING_EXACT] == found.cached_tokens - found.approximate_tokens
    assert "".join(p.text for p in found.prompt_parts) == client.detokenize(ids)
    *_, last = client.stream(ids, max_tokens=2, explain=True)
    assert last.final is not None
    assert sum(p.tokens for p in last.final.prompt_parts) == len(ids)
    assert not client.generate(ids, max_tokens=1).prompt_parts


@given(st.integers(1, 60), st.data())
def test_parts_cover_a_prompt_in_order(tokens: int, data: st.DataObject) -> None:
    exact = data.draw(st.integers(0, tokens - 1))
    start = data.draw(st.integers(exact, tokens - 1))
    end = data.draw(st.integers(start, tokens - 1))
    stretches = (RelocatedSpan(start, end),) if end > start else ()
    repaired = np.array(sorted(data.draw(st.sets(st.integers(start, end - 1)))) if stretches else [], np.int64)
    found = provenance_spans(tokens, exact, ReusePlan(tokens, exact, stretches), repaired)
    assert [p.start for p in found] == [0, *(p.end for p in found[:-1])]
    assert found[-1].end == tokens
    assert all(a.provenance is not b.provenance for a, b in pairwise(found))
    of = {t: p.provenance for p in found for t in range(p.start, p.end)}
    assert all((of[t] is Provenance.EXACT) == (t < exact) for t in of)
    assert {t for t in of if of[t] is Provenance.RECOMPUTED} == set(repaired.tolist())


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=40), st.data())
def test_cut_texts_join(text: str, data: st.DataObject) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    if not tokens:
        return
    ends = sorted(data.draw(st.sets(st.integers(1, len(tokens))))) or [len(tokens)]
    ends = ends if ends[-1] == len(tokens) else [*ends, len(tokens)]
    pieces = split_text(TOKENIZER.decode, tokens, ends)
    assert len(pieces) == len(ends)
    assert "".join(pieces) == TOKENIZER.decode(tokens)


def test_a_character_of_several_tokens_goes_to_the_piece_that_completes_it() -> None:
    tokens = TOKENIZER("a🦊b", add_special_tokens=False)["input_ids"]
    pieces = split_text(TOKENIZER.decode, tokens, list(range(1, len(tokens) + 1)))
    assert [piece for piece in pieces if piece] == ["a", "🦊", "b"]
