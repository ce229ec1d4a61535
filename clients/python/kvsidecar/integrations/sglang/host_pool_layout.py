"""KV layouts of SGLang's host pools, by name.

Each layout describes what SGLang's own code does. An unknown layout is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.kv_layout import LayerKVLayout, PagedKVCache, data_type, strided_layout
from kvsidecar.kv_transfer.layout_selftest import check_layout
from kvsidecar.kv_transfer.named_pages import NAME_TOKENS

log = logging.getLogger(__name__)

# The class of the supported pool, which contains the keys and values of all layers. Other pools contain latents,
# states, or quantized pages with scales.
_POOL = "MHATokenToKVPoolHost"

# Functions by the name of the layout. Each returns the keys or values of one layer as [pages, tokens, heads, channels].
# Its arguments are the tensor with the keys or values of all layers (``init_kv_buffer`` of
# ``sglang/srt/mem_cache/pool_host/mha.py``), the layer, and the number of tokens per page.
LAYOUTS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "layer_first": lambda half, layer, tokens: half[layer].view(-1, tokens, *half.shape[2:]),
    "page_first": lambda half, layer, tokens: half.view(-1, tokens, *half.shape[1:])[:, :, layer],
    "page_first_direct": lambda half, layer, tokens: half[:, layer],
}


def host_pool_cache(pool: Any, bits: int) -> PagedKVCache:
    """Return the layout of a ``HostKVCache``; if the pool is empty, a self-test checks the layout first.

    Raises ConfigurationError for an unknown pool, an unknown layout, or a failed self-test.
    """
    if type(pool).__name__ != _POOL:
        raise ConfigurationError(
            f"the host pool is a {type(pool).__name__}; KVSidecar keeps a {_POOL}: models with keys and values of one "
            "kind, in 16 or 32 bits"
        )
    if pool.layout not in LAYOUTS:
        raise ConfigurationError(
            f"--hicache-mem-layout is {pool.layout}, which KVSidecar does not know; known are {', '.join(LAYOUTS)}"
        )
    if pool.head_dim != pool.v_head_dim:
        raise ConfigurationError(
            f"keys have {pool.head_dim} channels and values {pool.v_head_dim}; KVSidecar keeps those with the same"
        )
    if pool.page_size < NAME_TOKENS:
        raise ConfigurationError(
            f"--page-size is {pool.page_size}; at least {NAME_TOKENS} are needed to name a page, 64 is usual"
        )
    geometry = Geometry(pool.layer_num, pool.head_num, pool.head_dim, data_type(pool.dtype), bits)
    lay, tokens = LAYOUTS[pool.layout], pool.page_size
    layers = tuple(
        LayerKVLayout(
            strided_layout(lay(pool.k_buffer, i, tokens), "bthc"), strided_layout(lay(pool.v_buffer, i, tokens), "bthc")
        )
        for i in range(pool.layer_num)
    )
    cache = PagedKVCache(f"SGLang's {pool.layout}", geometry, tokens, layers)
    if pool.available_size() == pool.logical_size:
        check_layout(cache, lambda layer, keys, values, slots: _write(pool, layer, keys, values, slots))
    else:  # SGLang was already running when the storage was attached
        log.info("the host pool is in use, so its layout %s was not checked", pool.layout)
    return cache


def _write(pool: Any, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write to a layer through the views that SGLang uses for its own copies."""
    for refs, rows in ((pool.k_data_refs, keys), (pool.v_data_refs, values)):
        view = refs[layer]
        if view.ndim == 4:  # pages and tokens are separate dimensions
            view[slots // pool.page_size, slots % pool.page_size] = rows
        else:
            view[slots] = rows
