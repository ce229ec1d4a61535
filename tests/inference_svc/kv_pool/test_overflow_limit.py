"""Contexts beyond the pool under a real limit on memory: what lies in the file is not what the limit is spent on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory_limit import MemoryLimit, MemoryLimitUnavailable
from benchmarks.node import Node
from inference_svc.models.loader import DEMO_MODEL
from tests.inference_svc.engine.test_exactness import prompt

MIB = 1 << 20
POOL, TIMES = 512, 4
# Small but for its keys and values, so that those are what a limit is about: 256 KiB a token.
SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
TOKEN_BYTES = 2 * 8 * 32 * 128 * 4
# Of the worker alone, with libraries and what a batch computes with: without the keys and values.
WORKER_BYTES = 640 * MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, folder / file)
    return folder


def asked(model: Path, pool_tokens: int, limit: MemoryLimit | None, overflow: Path) -> list[int]:
    """The answer to a prompt of nearly four pools, by a worker of its own."""
    flags = {"cache_socket": "none", "dtype": "float32", "overflow_dir": overflow, "batch_tokens": 128}
    flags["overflow_bytes"] = TIMES * POOL * TOKEN_BYTES if limit else 0
    node = Node(str(model), workers=0, pool_bytes=str(pool_tokens * TOKEN_BYTES), worker_flags=flags)
    if limit is not None:
        node.launch = limit.launch  # type: ignore[method-assign, assignment]
    try:
        node.start_worker(0)
        ids = prompt(1, TIMES * POOL - 40)
        found = node.client().generate(ids, max_tokens=8, temperature=0, ignore_eos=True)
        assert node.client().stats().overflowed == (1 if limit else 0)
        return list(found.token_ids)
    finally:
        node.__exit__()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_four_times_the_pool_is_answered_within_the_limit(model: Path, tmp_path: Path) -> None:
    limit_bytes = WORKER_BYTES + POOL * TOKEN_BYTES
    try:
        limit = MemoryLimit(limit_bytes).__enter__()
    except MemoryLimitUnavailable as error:
        pytest.skip(str(error))
    try:
        got = asked(model, POOL, limit, tmp_path)
        assert limit.peak_bytes <= limit_bytes, "cached pages of the file included"
        assert limit.peak_bytes > 0.9 * limit_bytes, "it would have fitted"
    finally:
        limit.__exit__()
    assert got == asked(model, TIMES * POOL + 512, None, tmp_path)
