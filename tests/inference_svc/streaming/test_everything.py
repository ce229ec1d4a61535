"""Streaming, speculation, reuse, repair, grammars and adapters in one worker, and clients that go: nothing is left."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kvsidecar import Client
from kvsidecar.errors import DeadlineExceeded

from benchmarks.node import Node
from inference_svc.model.loader import load
from tests.inference_svc.lora.making import linears, tensors, write
from tests.inference_svc.reuse.test_approximate import DOC, FLAGS, documents, joined
from tests.inference_svc.test_exactness import prompt

SYSTEM = prompt(1, 150)
KINDS = ("prefix", "repair", "grammar", "law", "med", "guesses")
ORDERED = re.compile(r"(red|green|blue)-\d{2}")


@pytest.fixture(scope="module")
def served(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A worker with everything on; of finished sequences none stays in the pool, so that all of it must be free."""
    folder, layers = tmp_path_factory.mktemp("adapters"), linears(load("demo", dtype="float32"))
    for seed, name in enumerate(("law", "med")):
        write(folder / name, tensors(layers, seed))
    flags = FLAGS | {
        "stream": "full_stream",
        "stream_slots": 2,
        "lora": f"law={folder / 'law'},med={folder / 'med'}",
        "resident_sequences": 0,
        "batch_sequences": 12,
        "speculate": "ngram",
    }
    with Node("demo", arena_bytes="128MiB", pool_bytes="64MiB", worker_flags=flags) as running:
        yield running


def asked(kind: str, rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt and its options."""
    chat = SYSTEM + prompt(rng.randrange(20), rng.randint(20, 200))
    if kind == "repair":
        parts = documents(4)
        rng.shuffle(parts)
        return joined([*parts, [DOC, *prompt(rng.randrange(100), 20)]]), {}
    if kind == "grammar":
        return chat, {"regex": ORDERED.pattern, "ignore_eos": False}
    if kind == "guesses":
        return prompt(rng.randrange(4), 30) * 6, {"speculation": "ngram"}
    return chat, {"model": kind} if kind in ("law", "med") else {}


def many(node: Node, requests: int) -> dict[str, int]:
    """Requests of all kinds, a third of them cancelled at some point; sums of what the others say."""
    client, sums, lock = node.client(), dict.fromkeys(("repaired", "cached", "accepted"), 0), threading.Lock()

    def one(i: int) -> str:
        rng, kind = random.Random(i), KINDS[i // 3 % len(KINDS)]
        ids, options = asked(kind, rng)
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": i} if rng.random() < 0.5 else {"temperature": 0}
        length = rng.randint(8, 24)
        asking = {"max_tokens": length, "ignore_eos": True} | sampled | options
        if i % 3 == 0:
            # Some while they wait or their prompt is read, some in their answer.
            seconds = rng.uniform(0.01, 0.5) if rng.random() < 0.5 else 60.0
            stream = client.stream(ids, deadline=seconds, **asking)
            with suppress(DeadlineExceeded):
                for _ in zip(range(rng.randint(1, 6)), stream, strict=False):
                    pass
            stream.close()
            return "cancelled"
        stream = client.stream(ids, **asking)
        final = list(stream)[-1].final
        assert final is not None
        assert kind != "grammar" or ORDERED.fullmatch(final.text)
        with lock:
            sums["repaired"] += final.recomputed_tokens
            sums["cached"] += final.cached_tokens
            sums["accepted"] += final.accepted_tokens
        return "done"

    order = list(range(requests))
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(24) as pool:
        outcomes = list(pool.map(one, order))
    assert outcomes.count("done") == requests - len(range(0, requests, 3))
    return sums


def scored(client: Client, ids: list[int], **options: Any) -> tuple[list[Any], int]:
    """An answer's tokens with the likeliest in their places, and how many of the prompt's were cached."""
    found = client.generate(ids, max_tokens=6, temperature=0, ignore_eos=True, logprobs=5, **options)
    return [[(t.token_id, t.logprob) for t in one.top] for one in found.logprobs], found.cached_tokens


def leaves_nothing(node: Node, requests: int) -> None:
    client = node.client()
    client.warm(joined(documents(4)))
    sums = many(node, requests)
    assert all(sums.values()), sums
    node.settle(60)
    deadline = time.monotonic() + 20  # the last leases are given back without waiting for an answer
    while (cache := node.cache_stats()).leases and time.monotonic() < deadline:
        time.sleep(0.01)
    worker = client.stats()
    assert (worker.running, worker.waiting, worker.pending_saves, worker.cache_failures) == (0, 0, 0, 0)
    assert worker.pool_free_pages == worker.pool_pages
    assert (cache.leases, cache.reservations) == (0, 0)
    assert worker.streaming.mode == "full_stream"
    # What is reused as it is has the bits of what is computed, for the model and for each adapter.
    ids = SYSTEM + prompt(500, 120)
    for name in ("", "law", "med"):
        want, _ = scored(client, ids, skip_cache=True, speculation="off", model=name)
        scored(client, ids, model=name)
        node.settle()
        assert scored(client, ids, model=name) == (want, len(ids) - 1)


def test_requests_of_all_kinds_a_third_cancelled_leave_nothing(served: Node) -> None:
    leaves_nothing(served, 36)


@pytest.mark.long
def test_200_of_them_leave_nothing_either(served: Node) -> None:
    leaves_nothing(served, 200)
