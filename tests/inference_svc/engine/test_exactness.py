"""Exact reuse through real processes: logits and outputs do not change, whoever was restarted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvsidecar import Client

from benchmarks.node import Node

CHUNK = 128


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 4000) for _ in range(tokens)]


def scores(client: Client, ids: list[int], **options: Any) -> tuple[list[tuple[int, float]], int]:
    """The 20 largest log probabilities at the prompt's end, and how many tokens came from the cache."""
    result = client.generate(ids, max_tokens=1, temperature=0, logprobs=20, **options)
    return [(t.token_id, t.logprob) for t in result.logprobs[0].top], result.cached_tokens


@pytest.mark.parametrize("chunks", [1, 2, 4, 16])
def test_a_hit_gives_the_logits_of_a_prefill(node: Node, chunks: int) -> None:
    client = node.client()
    ids = prompt(chunks, chunks * CHUNK + 5)
    want, cached = scores(client, ids, skip_cache=True)
    assert cached == 0
    client.warm(ids[:-3])
    got, cached = scores(client, ids)
    assert cached == len(ids) - 3
    assert got == want


@pytest.mark.parametrize("chunks", [1, 2, 4, 16])
def test_also_after_the_worker_died(node: Node, chunks: int) -> None:
    ids = prompt(100 + chunks, chunks * CHUNK + 5)
    want, _ = scores(node.client(), ids, skip_cache=True)
    node.client().warm(ids[:-3])
    node.settle()
    node.restart_worker(0)
    got, cached = scores(node.client(), ids)
    assert cached == len(ids) - 3
    assert got == want


@pytest.mark.parametrize("chunks", [1, 2, 4, 16])
def test_also_after_the_daemon_died(node: Node, chunks: int) -> None:
    ids = prompt(200 + chunks, chunks * CHUNK + 5)
    want, _ = scores(node.client(), ids, skip_cache=True)
    node.client().warm(ids[:-3])
    node.settle()
    node.restart_daemon()
    result = node.client().generate(ids, max_tokens=1, temperature=0, logprobs=20)
    assert result.cached_tokens == len(ids) - 3
    assert [(t.token_id, t.logprob) for t in result.logprobs[0].top] == want
    assert result.timings["transfer_ms"] > 0


def test_a_hit_ends_at_the_token_where_texts_part(node: Node) -> None:
    client = node.client()
    ids = prompt(300, 300)
    client.warm(ids)
    other = ids[:200] + prompt(301, 50)
    want, _ = scores(client, other, skip_cache=True)
    got, cached = scores(client, other)
    assert cached == 200
    assert got == want


def test_a_conversation_reuses_its_own_answers(node: Node) -> None:
    """Decoded tokens and prefilled tokens have the same keys, so that history is reused as generated."""
    client = node.client()
    warm, plain, known = prompt(400, 60), prompt(400, 60), 0
    for turn in range(4):
        a = client.generate(warm, max_tokens=50, temperature=0, ignore_eos=True)
        b = client.generate(plain, max_tokens=50, temperature=0, ignore_eos=True, skip_cache=True)
        assert a.token_ids == b.token_ids
        assert a.cached_tokens == known
        known = len(warm) + 49
        more = prompt(410 + turn, 20)
        warm += a.token_ids + more
        plain += b.token_ids + more


def test_the_batch_does_not_change_an_answer(node: Node) -> None:
    from concurrent.futures import ThreadPoolExecutor

    client = node.client()
    prompts = [prompt(500 + i, 30 + 37 * i) for i in range(8)]

    def ask(ids: list[int]) -> list[int]:
        return client.generate(ids, max_tokens=24, temperature=0, ignore_eos=True, skip_cache=True).token_ids

    alone = [ask(ids) for ids in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone


def test_tenants_share_nothing(node: Node) -> None:
    client = node.client()
    ids = prompt(600, 200)
    client.warm(ids, tenant_salt=b"a")
    assert client.generate(ids, max_tokens=1, tenant_salt=b"b").cached_tokens == 0
    assert client.generate(ids, max_tokens=1, tenant_salt=b"a").cached_tokens == 199


def test_two_workers_share_one_cache() -> None:
    with Node("demo", workers=2, arena_bytes="64MiB", pool_bytes="64MiB") as node:
        ids = prompt(700, 400)
        want, _ = scores(node.client(1), ids, skip_cache=True)
        node.client(0).warm(ids)
        got, cached = scores(node.client(1), ids)
        assert cached == 399
        assert got == want


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_storage_stays_close(bits: int) -> None:
    with Node("demo", storage_bits=bits, arena_bytes="64MiB", pool_bytes="64MiB") as node:
        client = node.client()
        ids = prompt(800, 500)
        want, _ = scores(client, ids, skip_cache=True)
        client.warm(ids[:-1])
        got, cached = scores(client, ids)
        assert cached == 499
        theirs = dict(want)
        shared = [(p, theirs[t]) for t, p in got if t in theirs]
        assert len(shared) >= (18 if bits == 8 else 10)
        assert max(abs(a - b) for a, b in shared) < (0.2 if bits == 8 else 2.0)
