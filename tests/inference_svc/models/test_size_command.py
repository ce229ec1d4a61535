"""Plans of ``kvsidecar size`` against the sizes of a real node."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from transformers import LlamaConfig

from benchmarks.node import Node
from inference_svc.models.kv_geometry import DTYPES, geometry_of
from inference_svc.models.loader import load
from inference_svc.models.model_resolver import DEMO_MODEL
from tests.inference_svc.models.gguf_files import SHAPE, random_model, write


def size(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvsidecar.cli.root_command", "size", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def planned(*arguments: str) -> Any:
    done = size(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_model_of_known_size() -> None:
    """The documents say 12 KiB per token."""
    plan = planned("shape:qwen2.5-0.5b", "--context", "8192", "--sessions", "50", "--workers", "2")
    assert plan["bytes_per_token"]["16"] == 2 * 24 * 2 * 64 * 2 == 12 << 10
    assert plan["bytes_per_token"]["16"] / 2 < plan["bytes_per_token"]["8"] < plan["bytes_per_token"]["16"] * 0.6
    assert plan["store_bytes"] == plan["arena_bytes"] == 50 * 8192 * (12 << 10)
    assert plan["min_arena_bytes"] == 8 * 8192 * (12 << 10) == 2 * plan["pool_bytes"]
    assert plan["memory_bytes"] == plan["arena_bytes"] + (128 << 20) + 2 * (plan["pool_bytes"] + (256 << 20))


def test_the_table_does_not_call_float32_16_bits() -> None:
    table = size("shape:qwen2.5-0.5b", "--context", "8192", "--sessions", "1", "--dtype", "float32").stdout
    assert "24.0 KiB as computed" in table
    assert "at 8 bits" in table
    assert "at 16 bits" not in table


def test_a_folder_without_a_dtype_is_planned_as_it_is_loaded(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in settings.items() if name not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(kept))
    assert geometry_of(str(folder), "auto") == load(str(folder), device="cpu").geometry(16)


def test_a_gguf_file_is_planned_as_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An F32 file with 32 channels per head, which only rope.dimension_count tells."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    file = write(tmp_path / "model.gguf", "llama", random_model(LlamaConfig(**SHAPE, head_dim=32)))
    planned_geometry = geometry_of(str(file), "auto")
    assert planned_geometry == load(str(file), device="cpu").geometry(16)
    assert planned_geometry.head_dim == 32


def test_a_node_with_the_planned_sizes_keeps_all_sessions_in_memory() -> None:
    sessions, context = 6, 512
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", daemon_flags={"store": "none"}) as node:
        (session,) = node.cache_stats().session_details
        dtype = next(name for name, value in DTYPES.items() if value == session.descriptor.dtype)
        plan = planned("demo", "--context", str(context), "--sessions", str(sessions), "--dtype", dtype)
        for i in range(sessions):
            ids = [10 + (i * 31 + j * 7) % 4000 for j in range(context - 1)]
            node.client().generate(ids, max_tokens=1)
        node.settle()
        stats: pb.StatsResponse = node.cache_stats()
    assert stats.tokens >= sessions * (context - 8)
    exact = stats.tokens * plan["bytes_per_token"]["16"]
    assert exact <= stats.arena_used_bytes <= plan["arena_bytes"] + (1 << 20)
    assert plan["arena_bytes"] < 1.5 * stats.arena_used_bytes, "it does not plan for more than is needed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--context", "0", "--sessions", "1"), "context is '0'; allowed are 1 to"),
        (("demo", "--context", "1", "--sessions", "9" * 30), "allowed are 1 to"),
        (("no-such-model", "--context", "1", "--sessions", "1"), "'no-such-model' is neither 'demo'"),
        (("--context", "1", "--sessions", "1"), "name a model"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    done = size(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
