"""Text read in another context, through real processes: found, moved, repaired, and never mistaken for exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvsidecar import Client
from kvsidecar.errors import InvalidRequest

from benchmarks.node import Node
from tests.inference_svc.engine.test_exactness import prompt

DOC = 7  # "<|doc|>" of the built-in tokenizer
FLAGS = {
    "dtype": "float32",
    "reuse_anywhere": True,
    "unverified_reuse": True,
    "chunking": "document",
    "document_separator": "<|doc|>",
}


def documents(seed: int, count: int = 4, size: int = 90) -> list[list[int]]:
    return [[DOC, *prompt(seed * 100 + i, size)] for i in range(count)]


def joined(parts: list[list[int]]) -> list[int]:
    return [1] + [t for part in parts for t in part]


def scores(client: Client, ids: list[int], **options: object) -> dict[int, float]:
    result = client.generate(ids, max_tokens=1, temperature=0, logprobs=20, **options)
    return {t.token_id: t.logprob for t in result.logprobs[0].top}


@pytest.fixture(scope="module")
def everything_again() -> Iterator[Node]:
    """A worker that computes all approximate tokens again."""
    flags = {**FLAGS, "repair": "cacheblend", "repair_ratio": 1.0, "resident_sequences": 0}
    with Node("demo", arena_bytes="128MiB", pool_bytes="64MiB", worker_flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def guided() -> Iterator[Node]:
    with Node("demo", arena_bytes="128MiB", pool_bytes="64MiB", worker_flags=FLAGS) as running:
        yield running


def test_documents_in_another_order_are_found_and_repaired_to_full_prefill(everything_again: Node) -> None:
    client = everything_again.client()
    a, b, c, d = documents(1)
    client.warm(joined([a, b, c, d]))
    ids = joined([c, a, d, b, [DOC, *prompt(5, 20)]])
    want = scores(client, ids, skip_cache=True)
    result = client.generate(ids, max_tokens=1, temperature=0, logprobs=20)
    # The first separator is a prefix that was read before.
    assert result.approximate_tokens == 4 * 91 - 1
    assert result.recomputed_tokens == 4 * 91 - 1
    got = {t.token_id: t.logprob for t in result.logprobs[0].top}
    assert got.keys() == want.keys()
    assert all(abs(got[t] - want[t]) < 1e-4 for t in want)


def test_exact_beginning_approximate_middle_fresh_end(guided: Node) -> None:
    client = guided.client()
    a, b, c, d = documents(2)
    client.warm(joined([a, b, c, d]))
    fresh = [DOC, *prompt(77, 50)]
    result = client.generate(joined([a, fresh, d, c, [DOC, *prompt(6, 20)]]), max_tokens=1, temperature=0)
    # The chunk that begins the prompt reaches up to the first separator; the next document begins alike.
    assert result.cached_tokens - result.approximate_tokens in (92, 93)
    assert result.approximate_tokens == 2 * 91
    assert 0 < result.recomputed_tokens < 0.2 * 2 * 91


def test_what_was_repaired_is_never_served_as_exact(guided: Node) -> None:
    client = guided.client()
    a, b, c, d = documents(3)
    client.warm(joined([a, b, c, d]))
    ids = joined([d, b, a, c, [DOC, *prompt(7, 20)]])
    want = scores(client, ids, skip_cache=True)
    assert client.generate(ids, max_tokens=30, temperature=0, ignore_eos=True).approximate_tokens > 0
    guided.settle()
    result = client.generate(ids, max_tokens=1, temperature=0, logprobs=20, exact_only=True)
    assert result.cached_tokens < 5
    got = {t.token_id: t.logprob for t in result.logprobs[0].top}
    assert got.keys() == want.keys()
    assert all(abs(got[t] - want[t]) < 1e-4 for t in want)


def test_marked_segments_are_documents_too(guided: Node) -> None:
    client = guided.client()
    parts = [prompt(900 + i, 80) for i in range(3)]
    ids = [1] + [t for p in parts for t in p]
    client.generate(ids, max_tokens=1, segment_ends=[1, 81, 161, 241])
    guided.settle()
    moved = [1, *parts[2], *parts[0], *prompt(8, 20)]
    result = client.generate(moved, max_tokens=1, segment_ends=[1, 81, 161])
    assert result.approximate_tokens == 160


def test_tenants_do_not_find_each_others_documents(guided: Node) -> None:
    client = guided.client()
    a, b, c, d = documents(4)
    client.generate(joined([a, b, c, d]), max_tokens=1, tenant_salt=b"a")
    guided.settle()
    ids = joined([b, a, prompt(9, 20)])
    assert client.generate(ids, max_tokens=1, tenant_salt=b"b").approximate_tokens == 0
    assert client.generate(ids, max_tokens=1, tenant_salt=b"a").approximate_tokens > 0


def test_without_a_verdict_only_prefixes_are_reused() -> None:
    flags = {**FLAGS, "reuse_anywhere": False, "unverified_reuse": False}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags) as node:
        a, b, c, d = documents(5)
        node.client().warm(joined([a, b, c, d]))
        ids = joined([b, a, [DOC, *prompt(9, 20)]])
        result = node.client().generate(ids, max_tokens=1, reuse_anywhere=True)
        assert result.approximate_tokens == 0


def test_bad_marks_are_refused(guided: Node) -> None:
    client = guided.client()
    with pytest.raises(InvalidRequest, match="segment_ends must rise from 1 to at most the prompt's 3"):
        client.generate([1, 2, 3], segment_ends=[2, 2])
    with pytest.raises(InvalidRequest, match="send the prompt as token_ids"):
        client.generate("text", segment_ends=[1])
    with pytest.raises(InvalidRequest, match="at most 64 are allowed"):
        client.generate("text", document_separator="-" * 65)
