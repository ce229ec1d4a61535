"""``status``, ``doctor`` and ``explain`` say which workers share what they store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32, NamespaceDescriptor
from kvsidecar.cli.doctor import cache_findings
from kvsidecar.cli.node_commands import parts_in
from kvsidecar.cli.sharing_group import numerics_text
from kvsidecar.inference.v1.inference_pb2 import Numerics
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

from benchmarks.node import Node

SAME, OTHER, FAR = "kvsidecar/4 aaaa", "kvsidecar/4 bbbb", "kvsidecar/4 any"


def described(producer: str, layers: int = 2) -> NamespaceDescriptor:
    return NamespaceDescriptor(
        model_fingerprint=bytes(32), layers=layers, kv_heads=1, head_dim=8, dtype=DATA_TYPE_FLOAT32, format_version=2,
        bits=16, tensor_parallel_size=1, producer=producer,
    )  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[Node]:
    """A daemon with two workers of the same numerics, one of others, and one of another model."""
    attached = {"one": described(SAME), "two": described(SAME), "three": described(OTHER), "four": described(FAR, 3)}
    with ExitStack() as stack:
        node = stack.enter_context(Node(workers=0, arena_bytes="4MiB"))
        for name, descriptor in attached.items():
            link = DaemonConnection(ServiceAddress(node.cache_socket), name, descriptor)
            stack.callback(link.close)
            assert link.wait(10)
        yield node


def test_status_says_which_workers_share_a_namespace(daemon: Node) -> None:
    (cache,) = (part for part in parts_in(daemon.cache_socket.parent) if part.name == "cache")
    clauses = cache.detail.split("; ")
    assert clauses[0].startswith("4 attached")
    assert any(c.startswith("one, two share namespace ") and c.endswith(f"({SAME})") for c in clauses)
    assert any(c.startswith("three uses namespace ") and c.endswith(f"({OTHER})") for c in clauses)


def test_the_doctor_says_who_shares_and_who_would_but_for_other_bits(
    daemon: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSIDECAR_CACHE_SOCKET", str(daemon.cache_socket))
    found = [f for f in cache_findings() if f.what == "shared cache"]
    assert [f.detail.split(" namespace")[0] for f in found[:3]] == ["one, two share", "three uses", "four uses"]
    (note,) = found[3:]
    assert note.detail == "one, two and three share nothing: they compute other bits"
    assert "--share-across-machines" in note.advice


def test_a_worker_says_when_a_hit_may_change_an_answer() -> None:
    assert numerics_text(Numerics(id="aaaa")) == "numerics aaaa"
    assert "a hit may change an answer" in numerics_text(Numerics(id="aaaa", shared_across_machines=True))
    assert not numerics_text(Numerics())
