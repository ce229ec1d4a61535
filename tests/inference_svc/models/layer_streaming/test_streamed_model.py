"""Streaming, speculation, reuse, repair, grammars, adapters and contexts beyond the pool in one worker: answers are
those of a worker with none of it, clients that go leave nothing, and a worker that is killed loses nothing."""

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
from kvsidecar.errors import DeadlineExceeded, KVSidecarError, PromptTooLong
from kvsidecar.inference.v1 import inference_pb2 as pb

from benchmarks.node import Node
from inference_svc.models.loader import load
from tests.inference_svc.context_reuse.test_approximate import DOC, FLAGS, documents, joined
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.lora.random_adapters import linears, tensors, write

SYSTEM = prompt(1, 150)
KINDS = ("prefix", "repair", "grammar", "law", "med", "guesses", "long")
ORDERED = re.compile(r"(red|green|blue)-\d{2}")
# The pool's tokens, those of the overflow, and what one takes: 12 layers, 2 heads of 32 numbers, keys and values.
POOL, BEYOND, TOKEN_BYTES = 960, 4096, 12 * 2 * 32 * 2 * 4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag that names two of them."""
    folder, layers = tmp_path_factory.mktemp("adapters"), linears(load("demo", dtype="float32"))
    for seed, name in enumerate(("law", "med")):
        write(folder / name, tensors(layers, seed))
    return f"law={folder / 'law'},med={folder / 'med'}"


@pytest.fixture(scope="module")
def served(home: Path, adapters: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A worker with everything on; of finished sequences none stays in the pool, so that all of it must be free. What
    is repaired is all computed again, so that answers do not depend on what was read before."""
    flags = FLAGS | {
        "repair": "cacheblend",
        "repair_ratio": 1.0,
        "stream": "full_stream",
        "stream_slots": 2,
        "lora": adapters,
        "resident_sequences": 0,
        "cache_timeout_ms": 30_000,  # no request goes on without what is stored because this machine is busy
        "batch_sequences": 12,
        "speculate": "ngram",
        "num_speculative_branches": 3,
        "overflow_bytes": BEYOND * TOKEN_BYTES,
        "overflow_dir": tmp_path_factory.mktemp("overflow"),
    }
    with Node("demo", arena_bytes="128MiB", pool_bytes=str(POOL * TOKEN_BYTES), worker_flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def plain(adapters: str) -> Iterator[Node]:
    """A worker with nothing of it, but the adapters."""
    flags = {"dtype": "float32", "cache_socket": "none", "lora": adapters, "resident_sequences": 0, "stream": "off"}
    node = Node("demo", workers=0, pool_bytes="256MiB", worker_flags=flags)
    try:
        node.start_worker(0)
        yield node
    finally:
        node.__exit__()


def asked(kind: str, rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt and its options."""
    chat = SYSTEM + prompt(rng.randrange(20), rng.randint(20, 200))
    if kind == "long":
        return prompt(rng.randrange(4), 600) * 6, {}
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
    moved = client.stats().overflowed

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
    return sums | {"overflowed": client.stats().overflowed - moved}


def scored(client: Client, ids: list[int], **options: Any) -> tuple[list[Any], int]:
    """An answer's tokens with the likeliest in their places, and how many of the prompt's were cached."""
    found = client.generate(ids, max_tokens=6, temperature=0, ignore_eos=True, logprobs=5, **options)
    return [[(t.token_id, t.logprob) for t in one.top] for one in found.logprobs], found.cached_tokens


def _held_pages(stats: pb.GetStatsResponse) -> int:
    return stats.pool_pages + stats.overflow_pages - stats.pool_free_pages - stats.overflow_free_pages


def leaves_nothing(node: Node, requests: int) -> None:
    client = node.client()
    client.warm(joined(documents(4)))
    sums = many(node, requests)
    assert all(sums.values()), sums
    node.settle(60)
    deadline = time.monotonic() + 20  # the last leases are given back without waiting for an answer
    while (cache := node.cache_stats()).leases and time.monotonic() < deadline:
        time.sleep(0.01)
    while _held_pages(worker := client.stats()) and time.monotonic() < deadline:
        time.sleep(0.01)  # they are counted at the end of the step
    assert (worker.running, worker.waiting, worker.pending_saves, worker.cache_failures) == (0, 0, 0, 0)
    assert worker.pool_free_pages == worker.pool_pages
    assert worker.overflow_free_pages == worker.overflow_pages
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
    leaves_nothing(served, 42)


@pytest.mark.long
def test_200_of_them_leave_nothing_either(served: Node) -> None:
    leaves_nothing(served, 200)


# ---- answers --------------------------------------------------------------------------------------------------------


def greedy(node: Node, requests: int, **asking: Any) -> tuple[list[Any], dict[str, int]]:
    """Greedy answers to requests of all kinds, many at a time: tokens and text, None where the worker went away. Sums
    of what they say."""
    client, sums, lock = node.client(), dict.fromkeys(("repaired", "cached", "accepted", "gone"), 0), threading.Lock()

    def one(i: int) -> Any:
        rng = random.Random(10_000 + i)
        # Those beyond the pool come one after the other: a few of them say it all.
        ids, options = asked("long" if i % 50 == 0 else KINDS[i % (len(KINDS) - 1)], rng)
        options = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "speculation_branches": 1 + i % 3} | options
        options.pop("speculation", None)  # as the worker has it
        try:
            found = client.generate(ids, deadline=1500, **options, **asking)
        except KVSidecarError:
            with lock:
                sums["gone"] += 1
            return None
        with lock:
            sums["repaired"] += found.recomputed_tokens
            sums["cached"] += found.cached_tokens
            sums["accepted"] += found.accepted_tokens
        return list(found.token_ids), found.text

    with ThreadPoolExecutor(24) as pool:
        return list(pool.map(one, range(requests))), sums


def same(served: Node, plain: Node, requests: int) -> None:
    want, without = greedy(plain, requests, skip_cache=True)
    assert without == dict.fromkeys(without, 0)
    served.client().warm(joined(documents(4)))
    before = served.client().stats()
    got, sums = greedy(served, requests)
    different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    assert not different, [(i, got[i], want[i]) for i in different[:3]]
    assert sums.pop("gone") == 0
    assert all(sums.values()), sums
    after = served.client().stats()
    assert after.overflowed > before.overflowed
    assert after.streaming.read_bytes > before.streaming.read_bytes
    assert after.draft_tokens > after.accepted_tokens, "guesses were refused as well"


def test_greedy_answers_are_those_of_a_worker_with_none_of_it(served: Node, plain: Node) -> None:
    same(served, plain, 60)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_thousand_of_them_too(served: Node, plain: Node) -> None:
    same(served, plain, 1000)


def test_a_worker_that_is_killed_in_the_middle_and_started_again_answers_alike(served: Node, plain: Node) -> None:
    """With the same daemon, which has what the first one stored."""
    want, _ = greedy(plain, 40, skip_cache=True)
    done = served.client().stats().requests
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(greedy, served, 40)
        deadline = time.monotonic() + 120
        while served.client().stats().requests < done + 5 and not first.done():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        served.kill("worker-0")
        got, _ = first.result(600)
    assert all(a in (None, b) for a, b in zip(got, want, strict=True))
    served.start_worker(0)
    got, sums = greedy(served, 40)
    assert got == want
    assert sums["cached"] > 0
    served.settle(60)
    deadline = time.monotonic() + 20
    while (cache := served.cache_stats()).leases and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (cache.leases, cache.reservations, cache.sessions) == (0, 0, 3), "of the model and of each adapter"


def test_what_cannot_fit_gets_one_refusal_and_disturbs_nobody(served: Node, plain: Node) -> None:
    def beside(node: Node, ids: list[int]) -> list[int]:
        return list(node.client().generate(ids, max_tokens=100, temperature=0, ignore_eos=True).token_ids)

    others = [prompt(300 + i, 60) for i in range(4)]
    want = [beside(plain, ids) for ids in others]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(beside, served, ids) for ids in others]
        for _ in range(3):
            with pytest.raises(PromptTooLong, match="4096"):
                served.client().generate(prompt(1, 4200), max_tokens=4, deadline=60)
        assert [one.result(120) for one in running] == want
