"""SGLang's pages at a real daemon; with SGLang's own classes under ``make test-sglang``."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvsidecar.errors import ConfigurationError
from kvsidecar.integrations.sglang.host_pool_layout import host_pool_cache
from kvsidecar.integrations.sglang.page_hints import PageHints
from kvsidecar.integrations.sglang.page_store import PageStore
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress
from safetensors.torch import save_file

from benchmarks.node import Node
from tests.cache_daemon.conftest import descriptor
from tests.integrations.pools import (
    DIM,
    HEADS,
    LAYERS,
    LAYOUTS,
    PAGE,
    MHATokenToKVPoolHost,
    import_sglang,
    page_of,
    slots,
)

NAMES = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(4)]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="32MiB") as running:
        yield running


def keeper(node: Node, name: str, pool: MHATokenToKVPoolHost, bits: int = 16) -> PageStore:
    cache = host_pool_cache(pool, bits)
    link = DaemonConnection(ServiceAddress(node.cache_socket), name, descriptor(name, cache.geometry))
    assert link.wait(30)
    return PageStore(cache, link, timeout=20.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_wherever_and_in_whatever_layout(node: Node, layout: str) -> None:
    pool, other = MHATokenToKVPoolHost("layer_first"), MHATokenToKVPoolHost(layout)
    ours, theirs = keeper(node, f"to {layout}", pool), keeper(node, f"to {layout}", other)
    for page in (1, 2, 4):
        pool.fill(page, page_of(page))
    assert ours.exists(NAMES) == 0
    assert ours.store(NAMES[:3], slots(4, 1, 2).numpy()) == [True] * 3
    assert ours.store(NAMES[:1], slots(5).numpy()) == [True], "it is stored already, and what it holds stays"
    assert (theirs.exists(NAMES), theirs.exists(NAMES[1:]), theirs.exists(NAMES[::-1])) == (3, 2, 0)
    before = [other.rows(page) for page in range(6)]
    assert theirs.load([NAMES[1], NAMES[3], NAMES[0]], slots(0, 3, 5).numpy()) == [True, False, True]
    for page, rows in (
        (0, page_of(1)),
        (5, page_of(4)),
        (1, before[1]),
        (2, before[2]),
        (3, before[3]),
        (4, before[4]),
    ):
        assert torch.equal(other.rows(page), rows)
    theirs.clear()
    assert ours.exists(NAMES) == 0
    for one in (ours, theirs):
        one.close()


def test_the_hints_of_a_call_reach_its_pages(node: Node) -> None:
    pool = MHATokenToKVPoolHost("layer_first")
    pages, hints = keeper(node, "hinted", pool), PageHints(pool.page_size)
    directives = [{"end": pool.page_size, "priority": 50, "duration": 600}]
    retain = {"action_type": "kv.retain", "action_version": "1.0", "payload": {"directives": directives}}
    envelope = {"actions": [retain, {"action_type": "kv.share", "action_version": "1.0", "payload": {}}]}
    before = node.cache_stats().retained_bytes
    for name, prefix in ((NAMES[0], None), (NAMES[1], NAMES[:1])):
        call = SimpleNamespace(prefix_keys=prefix, extra_info={"kv_hints": envelope})
        assert pages.store([name], slots(1).numpy(), hints.of_call(call)) == [True]
        assert node.cache_stats().retained_bytes > before, "only the first page of the prompt is retained"
    retained = node.cache_stats().retained_bytes - before
    assert pages.store([NAMES[2]], slots(1).numpy(), hints.of_call(None)) == [True]
    assert node.cache_stats().retained_bytes - before == retained
    assert (hints.num_applied, hints.num_ignored) == (2, 2)
    everything = [{"priority": 50, "duration": 600}]
    retain["payload"] = {"directives": everything}
    assert pages.exists(NAMES[:3], hints.of_call(call)) == 3
    assert node.cache_stats().retained_bytes - before == 3 * retained
    pages.clear()
    pages.close()


def test_what_was_copied_while_the_process_hung_is_not_used(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon may have ended the session, and given the pages to others."""
    pool = MHATokenToKVPoolHost("layer_first")
    ours = keeper(node, "hung", pool)
    pool.fill(1, page_of(1))
    assert ours.store(NAMES[:1], slots(1).numpy()) == [True]
    unpack = ours._reader.unpack

    def slow(*arguments: Any) -> None:
        unpack(*arguments)
        session = ours._connection.session
        assert session is not None
        session.record_ack = lambda _: None  # type: ignore[method-assign]
        session.last_acked_at = time.monotonic() - 2.1 * session.heartbeat_seconds

    monkeypatch.setattr(ours._reader, "unpack", slow)
    assert ours.load(NAMES[:1], slots(2).numpy()) == [False]
    monkeypatch.setattr(ours._reader, "unpack", unpack)
    assert ours._connection.wait(30)
    assert ours.load(NAMES[:1], slots(2).numpy()) == [True]
    ours.close()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.3)])
def test_fewer_bits_are_close(node: Node, bits: int, most: float) -> None:
    pool = MHATokenToKVPoolHost("page_first", torch.float32)
    one = keeper(node, f"{bits} bits", pool, bits)
    pool.fill(0, page_of(7, torch.float32))
    assert one.store(NAMES[:1], slots(0).numpy()) == [True]
    assert one.load(NAMES[:1], slots(3).numpy()) == [True]
    error = (pool.rows(3) - page_of(7, torch.float32)).abs().max()
    assert 0 < error < most
    one.close()


def test_a_dead_daemon_costs_misses_and_its_pages_outlive_it() -> None:
    with Node(workers=0, arena_bytes="8MiB") as node:
        pool = MHATokenToKVPoolHost("page_first_direct")
        one = keeper(node, "mortal", pool)
        pool.fill(2, page_of(2))
        assert one.store(NAMES[:1], slots(2).numpy()) == [True]
        node.settle()
        node.kill("daemon")
        assert one.exists(NAMES[:1]) == 0
        assert one.load(NAMES[:1], slots(4).numpy()) == [False]
        assert one.store(NAMES[1:3], slots(0, 1).numpy()) == [False, False]
        with pytest.raises(ConnectionError, match="not there"):
            one.clear()
        node.start_daemon()
        assert one._connection.wait(20)
        assert one.load(NAMES[:1], slots(4).numpy()) == [True]
        assert torch.equal(pool.rows(4), page_of(2))
        one.close()


def test_a_session_that_ended_meanwhile_is_not_believed(node: Node) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    one = keeper(node, "late", pool)
    assert one.store(NAMES[:2], slots(0, 1).numpy()) == [True, True]
    session = one._connection.session
    assert session is not None
    session.record_ack = lambda _: None  # type: ignore[method-assign]
    session.last_acked_at -= 3 * session.heartbeat_seconds
    assert one.load(NAMES[:2], slots(2, 3).numpy()) == [False, False]
    one.close()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"layout": "page_head"}, "--hicache-mem-layout is page_head, which KVSidecar does not know; known are layer"),
        ({"v_head_dim": 8}, "keys have 16 channels and values 8"),
        ({"page_size": 1}, "--page-size is 1; at least 8"),
        ({"dtype": torch.float8_e4m3fn}, "float8_e4m3fn; allowed are"),
    ],
)
def test_pools_that_are_not_known_are_refused(change: dict[str, Any], what: str) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    for name, value in change.items():
        setattr(pool, name, value)
    with pytest.raises(ConfigurationError, match=what):
        host_pool_cache(pool, 16)


def test_a_pool_that_is_laid_out_otherwise_is_caught() -> None:
    pool = MHATokenToKVPoolHost("page_first")
    pool.layout = "layer_first"
    pool.k_buffer, pool.v_buffer = (half.reshape(LAYERS, pool.size, HEADS, DIM) for half in pool.kv_buffer)
    with pytest.raises(ConfigurationError, match=r"layer 0's keys .* is not where SGLang's layer_first is known"):
        host_pool_cache(pool, 16)


def test_other_pools_are_refused_by_name() -> None:
    class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
        pass

    with pytest.raises(ConfigurationError, match="the host pool is a MLATokenToKVPoolHost; KVSidecar keeps a MHAToken"):
        host_pool_cache(MLATokenToKVPoolHost("page_first"), 16)


# ---- SGLang's own classes -----------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    save_file({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    return str(tmp_path)


def loaded(node: Node, model: str, pool: MHATokenToKVPoolHost | None = None, **changes: Any) -> Any:
    """The backend as SGLang makes it from its flags."""
    import_sglang()
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    extra = {
        "backend_name": "kvsidecar", "module_path": "kvsidecar.integrations.sglang", "class_name": "KVSidecarStorage",
        "interface_v1": 1, "kvsidecar": {"socket": str(node.cache_socket), "timeout_ms": 5000},
    }  # fmt: skip
    extra |= changes.pop("extra", {})
    flags = {"model_path": model, "revision": None, "download_dir": None} | changes.pop("flags", {})
    published = runtime_context._ConfigBag("model")
    for name, value in flags.items():
        published._set(name, value)
    runtime_context.get_context()._config_bags = {"model": published}  # SGLang's scheduler does so when it starts
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="served", extra_config=extra,
    )  # fmt: skip
    backend = StorageBackendFactory.create_backend("dynamic", replace(config, **changes), pool)
    if pool is not None:
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
    return backend


@pytest.mark.sglang
def test_sglang_loads_it_by_its_flag_and_its_pages_come_back(node: Node, model: str) -> None:
    from abc import ABC

    pool = MHATokenToKVPoolHost("page_first")
    backend = loaded(node, model, pool)
    base = type(backend).__mro__[1]
    assert (base.__name__, base.__bases__) == ("HiCacheStorage", (ABC,))
    assert backend._store._connection.wait(30)
    pool.fill(3, page_of(3))
    assert all(backend.batch_set_v1(NAMES[:2], slots(3, 4)))
    assert backend.batch_exists(NAMES) == 2
    assert backend.exists(NAMES[1])
    assert not backend.exists(NAMES[2])
    assert backend.batch_get_v1(NAMES[:3], slots(0, 1, 2)) == [True, True, False]
    assert torch.equal(pool.rows(0), page_of(3))
    with pytest.raises(ValueError, match=f"8 indices for 2 pages; expected are {2 * PAGE}"):
        backend.batch_get_v1(NAMES[:2], slots(0))
    another = loaded(node, model, MHATokenToKVPoolHost("page_first"), tp_rank=1, tp_size=2)
    assert another._store._connection.wait(30)
    assert another.batch_exists(NAMES) == 0, "another rank's pages are others"
    backend.clear()
    assert backend.batch_exists(NAMES) == 0
    for one in (backend, another):
        one.close()


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"extra": {"interface_v1": 0}}, '"interface_v1": 1'),
        ({"extra": {"kvsidecar": {"bit": 4}}}, "has 'bit'; allowed are socket, .*bits"),
        ({"is_mla_model": True}, "MLA"),
        ({"pp_size": 2}, "pp_size is 2"),
        ({"should_split_heads": True}, "splits heads"),
        ({"flags": {"model_path": "no such model"}}, "cannot tell what the weights of no such model are"),
    ],
)
def test_what_is_not_kept_ends_sglangs_start(node: Node, model: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        loaded(node, model, **changes)


@pytest.mark.sglang
def test_only_the_same_revision_of_a_repository_shares_pages(node: Node, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    for revision, weight in (("a" * 40, 1.0), ("b" * 40, 2.0)):
        snapshot = repository / "snapshots" / revision
        snapshot.mkdir(parents=True)
        save_file({"w": torch.full((4,), weight)}, snapshot / "model.safetensors")
        (snapshot / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    first, second, again = (
        loaded(
            node, "org/name", MHATokenToKVPoolHost("page_first"),
            flags={"revision": revision * 40, "download_dir": str(tmp_path)},
        )
        for revision in "aba"
    )  # fmt: skip
    for one in (first, second, again):
        assert one._store._connection.wait(30)
    assert all(first.batch_set_v1(NAMES[:1], slots(0)))
    assert (second.batch_exists(NAMES), again.batch_exists(NAMES)) == (0, 1)
    for one in (first, second, again):
        one.close()


@pytest.mark.sglang
def test_an_sglang_that_hashes_only_tokens_is_refused(node: Node, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.5.20", "0.5.20.post1", "0.6.0rc1", "1.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        loaded(node, model).close()
    for version in ("0.5.19", "0.5.9.post1", "0.4.10"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        with pytest.raises(ConfigurationError, match=f"SGLang is {version}; .* needs 0.5.20"):
            loaded(node, model)


@pytest.mark.sglang
def test_sglang_starts_without_a_daemon(node: Node, model: str, tmp_path: Path) -> None:
    pool = MHATokenToKVPoolHost("layer_first")
    backend = loaded(node, model, pool, extra={"kvsidecar": {"socket": str(tmp_path / "none.sock")}})
    assert backend.batch_exists(NAMES) == 0
    assert backend.batch_get_v1(NAMES[:1], slots(0)) == [False]
    assert backend.batch_set_v1(NAMES[:1], slots(0)) == [False]
    backend.close()
