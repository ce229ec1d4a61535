"""Starts a worker's connector: KV layout, layout self-test, connection to the daemon."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention

from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import ConfigurationError
from kvsidecar.integrations.torch_numerics import torch_numerics
from kvsidecar.integrations.vllm.attention_layouts import kv_layout_of
from kvsidecar.integrations.vllm.connector_settings import ConnectorSettings
from kvsidecar.integrations.vllm.namespace_descriptor import descriptor
from kvsidecar.integrations.vllm.worker_connector import WorkerConnector
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.kv_layout import PagedKVCache, data_type
from kvsidecar.kv_transfer.layout_selftest import check_layout

log = logging.getLogger("vllm.kvsidecar")
_ATTACH_SECONDS = 1.0


def start_worker(settings: ConnectorSettings, config: Any, caches: Any, tensors: dict[str, Tensor]) -> WorkerConnector:
    """Create a rank's worker connector.

    Raises ConfigurationError if the cache's layout is unknown, or if the self-test finds that it is wrong.
    """
    group = caches.kv_cache_groups[0]
    spec, names = group.kv_cache_spec, group.layer_names
    layers = get_layers_from_vllm_config(config, Attention, names)
    backend = _backend(layers, names)
    first = tensors[names[0]]
    geometry = Geometry(len(names), spec.num_kv_heads, spec.head_size, data_type(spec.dtype), settings.bits)
    cache = PagedKVCache(backend, geometry, first.shape[2], tuple(kv_layout_of(backend, tensors[n]) for n in names))
    check_layout(cache, lambda layer, k, v, slots: _write(layers[names[layer]], tensors[names[layer]], k, v, slots))
    rank = get_tensor_model_parallel_rank()
    shared = settings.share_across_machines
    numerics = torch_numerics(first.device, config.model_config.dtype, shared)
    if shared:
        log.warning("share_across_machines is on: chunks of other machines are used; a hit may change answers")
    connection = DaemonConnection(
        settings.address,
        f"vllm-{rank}",
        descriptor(config, geometry, backend, rank, numerics),
        first.device.index if first.device.type == "cuda" else None,
        engine="vllm",
        log=log,
    )
    connection.wait(_ATTACH_SECONDS)
    return WorkerConnector(settings, cache, connection, rank, spec.block_size)


def _backend(layers: dict[str, Any], names: list[str]) -> str:
    """Return the name of the layers' common attention backend; on a CPU, it includes the instruction set."""
    found = set()
    for name in names:
        backend = layers[name].get_attn_backend().get_name()
        isa = getattr(layers[name], "isa", "")
        found.add(f"{backend} {isa}" if isa else backend)
    if len(found) != 1:
        raise ConfigurationError(f"layers have the attention backends {', '.join(sorted(found))}; all must have one")
    return found.pop()


def _write(layer: Any, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write keys and values to slots of a layer's cache through vLLM's own code.

    ``keys`` and ``values`` are ``[tokens, kv_heads, head_dim]``.
    """
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        raise ConfigurationError(
            f"the attention backend {layer.get_attn_backend().get_name()} has no way to write its cache apart from "
            "computing, so its layout cannot be checked"
        )
    with torch.inference_mode():
        update(layer, keys, values, cache, slots)
