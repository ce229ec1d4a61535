"""vLLM's layouts by name, against what its kernels write; without vLLM, which ``test_vllm_engine`` has."""

from __future__ import annotations

import pytest
import torch
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import ConfigurationError
from kvsidecar.integrations.vllm.attention_layouts import KNOWN, kv_layout_of
from kvsidecar.integrations.vllm.connector_settings import ConnectorSettings, read_settings
from kvsidecar.kv_transfer.kv_layout import PagedKVCache
from kvsidecar.kv_transfer.layout_selftest import check_layout
from torch import Tensor

BLOCKS, HEADS, TOKENS, DIM, LAYERS = 4, 2, 32, 64, 2
CHANNEL = torch.arange(DIM)


def vec(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """``cpu_attn_vec.hpp``: keys ``[channels, tokens]``, then values ``[tokens, channels]``."""
    halves = cache.view(BLOCKS, HEADS, 2, TOKENS * DIM)
    for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
        block, token = divmod(slot, TOKENS)
        halves[block, :, 0].view(HEADS, DIM, TOKENS)[:, :, token] = key
        halves[block, :, 1].view(HEADS, TOKENS, DIM)[:, token] = value


def amx(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """``cpu_attn_amx.hpp``: words of two channels of 16 tokens side by side; words of two tokens of 16 channels."""
    halves = cache.view(BLOCKS, HEADS, 2, TOKENS * DIM)
    for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
        block, token = divmod(slot, TOKENS)
        group, within = divmod(token, 16)
        halves[block, :, 0, 2 * (group * 16 * (DIM // 2) + CHANNEL // 2 * 16 + within) + CHANNEL % 2] = key
        halves[block, :, 1, CHANNEL // 16 * 16 * TOKENS + token // 2 * 32 + CHANNEL % 16 * 2 + token % 2] = value


def packed(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """``kv_cache.transpose(1, 2).split(head_size, dim=-1)``, as most backends for GPUs have it."""
    key_cache, value_cache = cache.transpose(1, 2).split(DIM, dim=-1)
    key_cache[slots // TOKENS, slots % TOKENS] = keys
    value_cache[slots // TOKENS, slots % TOKENS] = values


WRITERS = {name: {"vec": vec, "vec16": vec, "amx": amx}.get(name.split()[-1], packed) for name in KNOWN}


def caches(order: str) -> list[Tensor]:
    """``[blocks, heads, tokens, 2 * dim]`` per layer, in memory as vLLM's ``KVCacheLayout`` of this name has them."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * DIM}
    whole = torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16)
    return list(whole.permute([order.index(axis) for axis in "LBHNC"]))


def checked(name: str, tensors: list[Tensor], writer: str) -> None:
    geometry = Geometry(LAYERS, HEADS, DIM, DATA_TYPE_BFLOAT16, 4)
    cache = PagedKVCache(name, geometry, TOKENS, tuple(kv_layout_of(name, tensor) for tensor in tensors))
    check_layout(cache, lambda layer, k, v, slots: WRITERS[writer](tensors[layer], k, v, slots))


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_layout_is_what_its_backend_writes(name: str) -> None:
    checked(name, caches("LBHNC"), name)


@pytest.mark.parametrize("order", ["LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_backends_for_gpus_may_have_any_order_of_dimensions(order: str) -> None:
    checked("FLASH_ATTN", caches(order), "FLASH_ATTN")


@pytest.mark.parametrize(("name", "writer"), [("CPU_ATTN vec", "CPU_ATTN amx"), ("FLASH_ATTN", "CPU_ATTN vec")])
def test_a_layout_taken_for_another_is_caught(name: str, writer: str) -> None:
    """All have the same shape and the same strides."""
    with pytest.raises(ConfigurationError, match=f"is not where {name} is known to keep it"):
        checked(name, caches("LBHNC"), writer)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"backend TURBO keeps its KV cache in a layout that .* known are CPU"):
        kv_layout_of("TURBO", caches("LBHNC")[0])


def test_a_cpu_layout_that_is_not_in_one_piece_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be one piece"):
        kv_layout_of("CPU_ATTN vec", caches("LBNHC")[0])


def test_settings_say_what_is_wrong() -> None:
    assert read_settings({"bits": 4, "socket": "/s"}) == ConnectorSettings(socket="/s", bits=4)
    for given, what in (
        ({"bit": 4}, r"kv_connector_extra_config has 'bit'; allowed are socket, token_file"),
        ({"bits": 5}, "bits is 5; allowed are 16, 8 and 4"),
        ({"bits": "4"}, "bits is '4'; it must be a whole number"),
        ({"timeout_ms": 0}, "timeout_ms is 0; it must be at least 1"),
    ):
        with pytest.raises(ConfigurationError, match=what):
            read_settings(given)
