"""Reasons of misses where a real link makes loads slow, or ends them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb

from benchmarks.network_links import LOOPBACK
from benchmarks.node import Node
from benchmarks.proxy import Proxy
from benchmarks.two_hosts import RemoteWorkers, TlsListener

RNG = random.Random(7)


class Far:
    """A worker on another host. ``link`` can slow down and cut its network; the node ``here`` has the daemon."""

    def __init__(self, here: Node, there: RemoteWorkers, link: Proxy) -> None:
        self.here, self.there, self.link = here, there, link

    def ask(self, prompt: list[int]) -> pb.GenerateResponse:
        request = pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)),
            max_tokens=1,
            explain=True,
            sampling=pb.Sampling(temperature=0),
        )
        return self.there.client().stub.Generate(request, timeout=60)

    def stored(self, tokens: int = 200) -> list[int]:
        """Return a new prompt that the daemon has stored but the worker's pool does not have."""
        prompt = [RNG.randrange(16, 4000) for _ in range(tokens)]
        self.ask(prompt)
        self.there.settle()
        return prompt

    @contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        self.link.delay_seconds = seconds
        try:
            yield
        finally:
            self.link.go_on()


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    with ExitStack() as stack:
        door = TlsListener(tmp_path_factory.mktemp("tls"), "127.0.0.1")
        here = stack.enter_context(Node("demo", workers=0, daemon_flags=door.daemon_flags))
        link = Proxy(int(door.at.rpartition(":")[2]))
        stack.callback(link.close)
        address = f"127.0.0.1:{link.port}"
        flags = {"cache_address": address, "cache_timeout_ms": 5000, "resident_sequences": 0}
        there = stack.enter_context(RemoteWorkers(LOOPBACK, door, **flags))
        there.wait_attached(0)
        yield Far(here, there, link)


def test_a_load_whose_link_ends_says_that_no_daemon_answered(far: Far) -> None:
    prompt, answers = far.stored(), []
    with far.slow(0.8):
        asking = threading.Thread(target=lambda: answers.append(far.ask(prompt)))
        asking.start()
        while not far.here.cache_stats().leases:  # the match is answered, and its answer on the way for 0.8 s
            time.sleep(0.01)
        time.sleep(1.0)
        far.link.cut()
        asking.join()
    miss = answers[0].miss
    assert (miss.kind, miss.computed_tokens, miss.position) == ("unavailable", len(prompt), 0)
    far.there.wait_attached(0)


def test_a_load_that_exceeds_its_time_was_slower_than_computing_and_the_next_is_bypassed(far: Far) -> None:
    first, second = far.stored(), far.stored()
    with far.slow(1.3):
        late = far.ask(first).miss
    assert (late.kind, late.computed_tokens, late.position) == ("load_slower", len(first), 0)
    assert "loading takes longer than computing" in late.sentence
    far.there.wait_attached(0)
    assert far.ask(second).miss.kind == "load_slower", "expected of a load, without one"
