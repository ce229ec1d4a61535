"""Metrics of reuse by engine, namespace and tenant, as the daemon counts them for every engine."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kvkernels.paged_gather import Integers
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_transfer.block_copier import slots_of
from kvsidecar.kv_transfer.named_pages import NamedPage, NamedPages
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup
from kvsidecar.kv_transfer.session import CompletedLoad
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.node import Node, free_port
from tests.kvsidecar.kv_transfer.test_transfer import BLOCK_TOKENS, TOKENS, Engine

TENANTS = """
[tenant.red]
salt = "red-salt"
[tenant.blue]
salt = "blue-salt"
"""
PREFIX = "kvsidecar_engine_"
SLOTS: Integers = slots_of([0, 1, 2, 3], BLOCK_TOKENS)


class Scraped:
    """Values of a daemon's reuse metrics for one namespace."""

    def __init__(self, port: int, namespace: bytes) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        self.values = {
            (
                sample.name.removeprefix("kvsidecar_engine_"),
                *map(sample.labels.get, ("engine", "tenant", "kind")),
            ): sample.value
            for family in families
            for sample in family.samples
            if sample.name.startswith(PREFIX) and sample.labels["namespace"] == namespace.hex()[:12]
        }

    def __call__(self, name: str, tenant: str, kind: str | None = None, engine: str = "kvsidecar") -> float:
        return self.values.get((f"{name}_total", engine, tenant, kind), 0.0)


@contextlib.contextmanager
def daemon(tmp_path: Path, max_tenants: int) -> Iterator[tuple[Node, int]]:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    (tmp_path / "tenants.toml").chmod(0o600)
    port = free_port()
    flags = {"metrics_port": port, "tenants": tmp_path / "tenants.toml", "metrics_tenants": max_tenants}
    with Node(workers=0, arena_bytes="64MiB", daemon_flags=flags) as node:
        yield node, port


def test_loads_stores_and_misses_are_counted_by_tenant_and_the_rest_is_other(tmp_path: Path) -> None:
    with daemon(tmp_path, 1) as (node, port):
        engine = Engine(node, "reuse")
        try:
            for salt in (b"red-salt", b"blue-salt", b"unnamed"):
                stored = engine.writer.store(
                    engine.session, engine.root(salt), TOKENS, salt, SLOTS, engine.nothing, token_seconds=0.5
                )
                assert engine.load([0, 1, 2, 3], TOKENS, first=BLOCK_TOKENS, salt=salt) == len(TOKENS)
                lookup = PrefixLookup(engine.cache.geometry, 5.0)
                lookup.count_miss(engine.session, engine.link.namespace, [*TOKENS, 7, 8], salt, 0)
                found = lookup.match(engine.session, [9, *TOKENS], salt, known_tokens=1)
                lookup.release(found)
            deadline = time.monotonic() + 20
            while (now := Scraped(port, engine.link.namespace))("loads", "other") < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            engine.link.close()
        loaded = len(TOKENS) - BLOCK_TOKENS
        for tenant, times in (("red", 1), ("other", 2)):
            assert now("loads", tenant) == times
            assert now("loaded_tokens", tenant) == loaded * times
            assert now("loaded_bytes", tenant) == stored.stored_bytes * loaded // len(TOKENS) * times
            assert 0 < now("load_seconds", tenant) < 20
            assert now("saved_prefill_seconds", tenant) == pytest.approx(0.5 * loaded * times)
            assert now("stored_tokens", tenant) == len(TOKENS) * times
            assert now("stored_bytes", tenant) == stored.stored_bytes * times > 0
            kinds = {kind: now("miss_tokens", tenant, kind) for kind in ("never_seen", "not_stored", "differs")}
            assert sum(kinds.values()) == (2 + len(TOKENS)) * times, now.values
        assert now("loads", "blue") == now("loads", "") == 0


def test_without_the_setting_no_tenant_is_named(tmp_path: Path) -> None:
    with daemon(tmp_path, 0) as (node, port):
        engine = Engine(node, "reuse")
        try:
            engine.store([0, 1, 2, 3], TOKENS, salt=b"red-salt")
            assert Scraped(port, engine.link.namespace)("stored_tokens", "") == len(TOKENS)
        finally:
            engine.link.close()


def test_pages_of_engines_that_name_them_are_counted(tmp_path: Path) -> None:
    """SGLang's and LMCache's path."""
    with daemon(tmp_path, 0) as (node, port):
        engine = Engine(node, "pages", engine="sglang")
        try:
            pages = NamedPages.of(engine.link.namespace, engine.cache.geometry, 5.0)
            named = [NamedPage(b"one", BLOCK_TOKENS), NamedPage(b"two", BLOCK_TOKENS)]
            pages.store(engine.session, named, b"", lambda i, payload: None)
            held = pages.find(engine.session, named, b"")
            assert held is not None
            pages.release(held, CompletedLoad(2 * BLOCK_TOKENS, 100, 0.25))
            deadline = time.monotonic() + 20
            while not (now := Scraped(port, engine.link.namespace))("loads", "", engine="sglang"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert now("loaded_tokens", "", engine="sglang") == 2 * BLOCK_TOKENS
            assert now("load_seconds", "", engine="sglang") == 0.25
            assert now("stored_tokens", "", engine="sglang") == 2 * BLOCK_TOKENS
        finally:
            engine.link.close()


def test_an_impossible_load_report_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path, 0) as (node, _):
        engine = Engine(node, "wrong")
        try:
            session, lease = engine.session, b"l" * 16
            wrong = [
                ([pb.LoadReport(lease_id=lease)] * 2, "the number of loads is 2; at most 1"),
                ([pb.LoadReport(lease_id=lease, tokens=(1 << 48) + 1)], "a load's tokens is 281474976710657; at most"),
            ]
            for loads, sentence in wrong:
                with pytest.raises(grpc.RpcError, match=sentence) as caught:
                    session.stub.Release(pb.ReleaseRequest(session_id=session.id, lease_ids=[lease], loads=loads))
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        finally:
            engine.link.close()
