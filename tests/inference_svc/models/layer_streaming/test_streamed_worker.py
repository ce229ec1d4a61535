"""A worker whose layers are streamed: batches, reuse and repair give the answers of one that has them in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvsidecar import Client
from kvsidecar.errors import KVSidecarError

from benchmarks.node import Node
from inference_svc.models.layer_streaming.layer_file import WEIGHTS, LayerFile
from tests.inference_svc.context_reuse.test_approximate import DOC, documents, joined
from tests.inference_svc.engine.test_exactness import prompt

FLAGS = {
    "reuse_anywhere": True,
    "unverified_reuse": True,
    "chunking": "document",
    "document_separator": "<|doc|>",
    "dtype": "float32",
}
STREAM = {"stream": "full_stream", "stream_slots": 2}


def node(**flags: Any) -> Node:
    return Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", durable=False, worker_flags={**FLAGS, **flags})


def said(client: Client, ids: list[int], tokens: int = 12) -> tuple[Any, ...]:
    found = client.generate(ids, max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=1)
    return (
        tuple(found.token_ids),
        tuple(one.logprob for one in found.logprobs),
        found.cached_tokens,
        found.approximate_tokens,
        found.recomputed_tokens,
    )


def everything(client: Client) -> list[tuple[Any, ...]]:
    """Fresh prompts one by one and together, a text that goes on, and one in another order that is repaired."""
    found = [said(client, prompt(i, 50)) for i in range(2)]
    with ThreadPoolExecutor(6) as pool:
        found += list(pool.map(lambda i: said(client, prompt(10 + i, 20 + 30 * i)), range(6)))
    a, b, c, d = documents(4)
    client.warm(joined([a, b, c, d]))
    found.append(said(client, [*joined([a, b, c, d]), *prompt(3, 9)]))
    found.append(said(client, joined([c, a, d, b, [DOC, *prompt(5, 20)]])))
    assert found[-1][3] > 0, "nothing was repaired"
    assert found[-2][2] > 300, "nothing was reused"
    return found


@pytest.fixture(scope="module")
def streamed(home: Path) -> Iterator[Node]:
    with node(**STREAM) as running:
        yield running


@pytest.fixture(scope="module")
def weights(home: Path, streamed: Node) -> Path:
    """The file that the worker reads."""
    (found,) = home.glob(f"demo_model-*/{WEIGHTS}")
    return found


def test_batches_reuse_and_repair_give_the_same_bits(streamed: Node) -> None:
    with node(stream="off") as resident:
        want = everything(resident.client())
        assert resident.client().stats().streaming.mode == "full_resident"
        assert resident.client().stats().streaming.read_bytes == 0
    assert everything(streamed.client()) == want


def test_its_statistics_say_what_was_read(streamed: Node, weights: Path) -> None:
    before = streamed.client().stats().streaming
    streamed.client().generate(prompt(40, 30), max_tokens=8, temperature=0, ignore_eos=True, skip_cache=True)
    after = streamed.client().stats().streaming
    assert after.mode == "full_stream"
    assert after.pass_bytes < weights.stat().st_size
    assert after.resident_bytes < weights.stat().st_size
    passes = 8
    assert after.hits + after.waits + after.misses - before.hits - before.waits - before.misses == 12 * passes
    assert after.read_bytes - before.read_bytes >= (passes - 1) * after.pass_bytes
    assert after.read_seconds > before.read_seconds


def test_a_read_that_fails_is_the_requests_own_error_and_the_worker_goes_on(streamed: Node, weights: Path) -> None:
    client, whole = streamed.client(), weights.read_bytes()
    want = said(client, prompt(50, 40))
    os.truncate(weights, LayerFile(weights.parent).index.embedding.end)
    try:
        for seed in (51, 52):
            with pytest.raises(
                KVSidecarError, match=r"weights could not be read from their file: .* too early"
            ) as found:
                client.generate(prompt(seed, 40), max_tokens=4, temperature=0, skip_cache=True)
            assert found.value.reason == "INTERNAL"
    finally:
        weights.write_bytes(whole)
    assert said(client, prompt(50, 40))[:2] == want[:2]
    streamed.settle()
    stats = client.stats()
    assert (stats.running, stats.waiting) == (0, 0)
