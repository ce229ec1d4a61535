"""A real vLLM over a real daemon: ``make test-vllm``."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.node import Node
from tests.integrations.vllm_child import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
_BLOCK = 32
_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}


def prompts(seed: int, count: int, length: int = 200) -> list[list[int]]:
    """Half of each is shared by all."""
    draw = random.Random(seed)
    shared = [draw.randrange(512) for _ in range(length // 2)]
    return [shared + [draw.randrange(512) for _ in range(length // 2 + i)] for i in range(count)]


# Together with their answers they are more than the blocks of ``warm`` hold.
LONG = prompts(30, 8, 100)


def ids(found: list[dict[str, Any]]) -> list[list[int]]:
    return [one["ids"] for one in found]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**_SHAPE)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="64MiB", daemon_flags={"heartbeat_ms": 2000}) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[int]]]:
    """What vLLM answers without a connector and without its own prefix cache."""
    engine = Engine(model, tmp_path_factory.mktemp("log") / "plain", None, enable_prefix_caching=False)
    found = {seed: ids(engine.ask(prompts(seed, 12))) for seed in range(4)}
    found[-1] = ids(engine.ask(LONG, tokens=90))
    engine.kill()
    return found


@pytest.fixture(scope="module")
def warm(
    model: Path, node: Node, expected: dict[int, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine whose predecessor has read the prompts of seeds 0 and 1, stored them, and was killed."""
    logs = tmp_path_factory.mktemp("log")
    first = Engine(model, logs / "first", node.cache_socket)
    for seed in (0, 1):
        assert ids(first.ask(prompts(seed, 12))) == expected[seed], "answers changed while storing"
    node.settle_stores()
    first.kill()
    # Few blocks: eight requests do not fit, so that some are preempted.
    engine = Engine(model, logs / "second", node.cache_socket, num_gpu_blocks_override=44)
    yield engine
    engine.kill()


def test_it_is_warm_after_its_own_restart_and_answers_the_same(
    warm: Engine, expected: dict[int, list[list[int]]]
) -> None:
    asked = prompts(0, 12)
    found = [warm.ask([prompt])[0] for prompt in asked]
    assert ids(found) == expected[0]
    whole = sum(len(prompt) // _BLOCK * _BLOCK for prompt in asked)
    assert sum(one["cached"] for one in found) >= 0.99 * whole


def test_many_at_a_time_with_too_few_blocks_answer_the_same(warm: Engine, expected: dict[int, list[list[int]]]) -> None:
    """Loads, stores and preemptions together."""
    assert ids(warm.ask(prompts(1, 12))) == expected[1]
    assert ids(warm.ask(prompts(2, 12))) == expected[2]
    assert ids(warm.ask(LONG, tokens=90)) == expected[-1]


def test_salts_share_nothing(warm: Engine) -> None:
    (prompt,) = prompts(40, 1)
    first = warm.ask([prompt], salt="a")[0]
    assert first["cached"] == 0
    assert warm.ask([prompt], salt="b")[0]["cached"] == 0
    assert warm.ask([prompt], salt="a")[0] == {**first, "cached": len(prompt) // _BLOCK * _BLOCK}


def test_no_request_fails_when_the_daemon_is_killed_in_the_middle(
    warm: Engine, node: Node, expected: dict[int, list[list[int]]]
) -> None:
    killer = threading.Timer(0.3, node.kill, ["daemon"])
    killer.start()
    for seed in (3, 0, 1):
        assert ids(warm.ask(prompts(seed, 12))) == expected[seed]
    killer.join()
    assert not node.alive("daemon")
    assert ids(warm.ask(prompts(2, 12))) == expected[2]
    node.start_daemon()
    node.wait_sessions(2)
    before = node.cache_stats().commits
    assert ids(warm.ask(prompts(50, 2))) == ids(warm.ask(prompts(50, 2)))
    node.settle_stores()
    assert node.cache_stats().commits > before


def test_loads_that_break_off_are_computed_again(warm: Engine, expected: dict[int, list[list[int]]]) -> None:
    """The last test: from here on no load of this engine succeeds."""
    warm.ask(prompts(60, 6, 400))  # what it had of its own is gone
    warm.break_loads()
    assert ids(warm.ask(prompts(0, 12))) == expected[0]
    assert "planted" in warm.log.read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM
def test_statistics_become_prometheus_metrics() -> None:
    pytest.importorskip("vllm")
    from kvsidecar.integrations.vllm.vllm_metrics import ConnectorMetrics, ConnectorStats
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    engine = {"engine": "7"}
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = ConnectorMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {7: ["7"]})
    step = ConnectorStats({"loaded_tokens": 64, "lookups.hit": 2, "attached": 1.0})
    metrics.observe(step.aggregate(ConnectorStats({"lookups.hit": 1, "attached": 0.0})).data, 7)
    assert REGISTRY.get_sample_value("vllm:kvsidecar_loaded_tokens_total", engine) == 64
    assert REGISTRY.get_sample_value("vllm:kvsidecar_lookups_total", engine | {"outcome": "hit"}) == 3
    assert REGISTRY.get_sample_value("vllm:kvsidecar_attached", engine) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM
def test_sliding_windows_work_beside_full_attention_and_are_refused_alone() -> None:
    pytest.importorskip("vllm")
    import torch
    from kvsidecar.errors import ConfigurationError
    from kvsidecar.integrations.vllm.config_check import check_config
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    windows = SlidingWindowSpec(**shape, sliding_window=64)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="m"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(),
        speculative_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),  # as with our connector
    )
    mixed, alone = (
        SimpleNamespace(kv_cache_groups=get_kv_cache_groups(config, {"0": windows, "1": second}))
        for second in (FullAttentionSpec(**shape), windows)
    )
    check_config(config, mixed)
    with pytest.raises(ConfigurationError, match=r"m has 1 KV cache group\(s\) of SlidingWindowSpec; KVSidecar"):
        check_config(config, alone)


# ---- vLLM's own kernels, without an engine --------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_kernels() -> Any:
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not for CPUs")
    current_platform.import_kernels()
    return _custom_ops


@pytest.mark.parametrize("planted", [False, True])
def test_a_planted_transposition_of_keys_is_caught(cpu_kernels: Any, planted: bool) -> None:
    import torch
    from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
    from kvsidecar.chunk_layout import Geometry
    from kvsidecar.errors import ConfigurationError
    from kvsidecar.integrations.vllm.attention_layouts import kv_layout_of
    from kvsidecar.kv_transfer.kv_layout import PagedKVCache
    from kvsidecar.kv_transfer.layout_selftest import check_layout

    tensors = [torch.zeros(3, 2, 64, 128, dtype=torch.bfloat16) for _ in range(2)]  # as many tokens as channels

    def write(layer: int, keys: Any, values: Any, slots: Any) -> None:
        key_cache, value_cache = tensors[layer].view(3, 2, 128, 64).chunk(2, dim=2)
        cpu_kernels.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, "vec")
        if planted:
            key_cache.copy_(key_cache.transpose(2, 3).clone())

    layers = tuple(kv_layout_of("CPU_ATTN vec", tensor) for tensor in tensors)
    cache = PagedKVCache("CPU_ATTN vec", Geometry(2, 2, 64, DATA_TYPE_BFLOAT16, 16), 64, layers)
    if planted:
        with pytest.raises(ConfigurationError, match="layer 0's keys"):
            check_layout(cache, write)
    else:
        check_layout(cache, write)
