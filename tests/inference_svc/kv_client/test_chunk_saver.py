"""Storing of finished sequences, with a daemon that loses or refuses chunks meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub

from benchmarks.node import Node
from tests.inference_svc.engine.test_exactness import prompt


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB") as running:
        yield running


def test_a_conversation_whose_chunks_were_deleted_is_stored_anew(node: Node) -> None:
    """The pool still has the first turn; its parent chunk in the daemon is gone when the second turn is stored."""
    client, ids = node.client(), prompt(1, 300)
    first = client.generate(ids, max_tokens=8, temperature=0, ignore_eos=True)
    node.settle()
    stub = CacheServiceStub(node.cache_channel())
    for chunk in stub.List(cache_pb2.ListRequest(page_size=1000)).chunks:
        stub.Delete(cache_pb2.DeleteRequest(prefix=cache_pb2.PrefixRef(root=chunk.root)))
    assert node.cache_stats().chunks == 0
    turn = [*ids, *first.token_ids, *prompt(2, 200)]
    assert client.generate(turn, max_tokens=1, temperature=0).cached_tokens >= len(ids), "the pool has the first turn"
    node.settle()
    node.restart_worker(0)
    again = node.client().generate(turn, max_tokens=1, temperature=0)
    assert again.cached_tokens == len(turn) - 1
