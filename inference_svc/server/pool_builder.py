"""Pool builder: the size of a worker's KV pool, and the pool."""

from __future__ import annotations

from typing import Any

import structlog
import torch
from kvkernels import ops
from kvkernels.device.visible_devices import device_of, is_device
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, first_line

from inference_svc.kv_pool.block_table import KEY_BLOCK, PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.overflow import Overflow
from inference_svc.model_runner.cuda_attention import find_library_attention, make_cuda_attention
from inference_svc.models.layer_streaming.residency_plan import SPARE_BYTES
from inference_svc.models.loader import LoadedModel
from inference_svc.sequence.prompt_logprobs import MAX_SCORED_ROWS
from inference_svc.server.overflow_builder import open_overflow
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.tensor_parallel.parallel_decoder import ParallelKVPool
from inference_svc.tensor_parallel.rank_processes import RankProcesses

log = structlog.get_logger("worker")

# Workspaces of a GPU's libraries, recorded graphs, and memory that allocations leave unused.
_LIBRARIES_BYTES = 512 << 20


def build_pool(
    config: WorkerConfig,
    loaded: LoadedModel,
    ranks: RankProcesses | None = None,
    draft: LoadedModel | None = None,
    adapter_bytes: int = 0,
) -> KVPool:
    """Build the KV pool. All ranks get the same number of blocks; their pools take ``pool_bytes`` together.

    With ``auto`` on a device, the pool leaves memory for the pool of a ``draft`` model and for ``adapter_bytes``, and
    is smaller than planned if the device has less memory. Raises ConfigurationError.
    """
    shard = loaded.shard
    kv_heads = loaded.kv_heads if shard is None else max(shard.all_kv_heads, shard.size)
    per_token = KVPool.bytes_per_token(loaded.layers, kv_heads, loaded.head_dim, loaded.dtype)
    size, shrinks = config.planned_pool_bytes, False
    if config.pool_bytes == "auto" and shard is None and is_device(loaded.device):
        size, shrinks = _left_for_pool(config, loaded, adapter_bytes), True
        both = per_token
        if draft is not None:
            both += KVPool.bytes_per_token(draft.layers, draft.kv_heads, draft.head_dim, draft.dtype)
        size = max(0, size - KEY_BLOCK * both) * per_token // both  # without the padding behind the last block
    # Upper bound: the tokens of a full batch of the longest sequences.
    planned = tokens = min(size // per_token, config.batch_sequences * loaded.context_length)
    refusal = ""
    while tokens >= 4 * PAGE_TOKENS:
        pool, refusal = _try_pool(config, loaded, tokens, ranks)
        if pool is not None:
            if tokens < planned:
                log.warning("the pool is smaller than planned, because memory is short", tokens=tokens, planned=planned)
            return pool
        if not shrinks:
            raise ConfigurationError(
                f"pool_bytes is {format_size(size)}, which {loaded.device} does not have: {refusal}; choose a smaller "
                "one, or auto"
            )
        tokens = tokens * 7 // 8
    needs = f"this model needs {format_size(per_token)} per token, at least {format_size(4 * PAGE_TOKENS * per_token)}"
    if not shrinks:
        raise ConfigurationError(f"pool_bytes is {format_size(size)}; {needs}")
    raise ConfigurationError(
        f"{loaded.device} has {format_size(size)} left for a pool with gpu_memory_utilization "
        f"{config.gpu_memory_utilization:g}; {needs}" + (f": {refusal}" if refusal else "")
    )


def _try_pool(
    config: WorkerConfig, loaded: LoadedModel, tokens: int, ranks: RankProcesses | None
) -> tuple[KVPool | None, str]:
    """Build a pool; None and the reason if the device has too little memory."""
    try:
        overflow = open_overflow(config, loaded, tokens) if loaded.shard is None else None
        return new_pool(loaded, tokens, overflow, ranks), ""
    except torch.OutOfMemoryError as error:
        return None, first_line(error)


def _left_for_pool(config: WorkerConfig, loaded: LoadedModel, adapter_bytes: int) -> int:
    """Memory in bytes that weights and a step leave of ``gpu_memory_utilization``.

    If memory is short and the share was not configured, it is at least what the plan of streamed layers left for the
    pool (``reserved_bytes``).
    """
    device = device_of(loaded.device)
    widened = 0 if loaded.streamed is None else loaded.streamed.residency.widened_bytes
    free = device.free_bytes() - adapter_bytes - widened
    unused = int((1 - config.gpu_memory_utilization) * device.facts.memory_bytes)
    left = free - unused - _step_bytes(config, loaded)
    if "gpu_memory_utilization" not in config.model_fields_set:
        left = max(left, min(free - SPARE_BYTES, config.planned_pool_bytes))
    return max(left, 0)


def _step_bytes(config: WorkerConfig, loaded: LoadedModel) -> int:
    """Estimate of a step's memory in bytes: activations, logits, and keys that are copied from the overflow."""
    model: Any = loaded.config
    width, inner = int(model.hidden_size), int(getattr(model, "intermediate_size", 0) or 4 * model.hidden_size)
    kv_width = 2 * loaded.kv_heads * loaded.head_dim
    row = 4 * width + 3 * (loaded.heads * loaded.head_dim + kv_width) + 4 * inner
    activations = config.step_tokens(loaded.device.type) * row * loaded.dtype.itemsize
    logit = 4 * torch.float32.itemsize
    logits = (config.batch_sequences + MAX_SCORED_ROWS) * int(model.vocab_size) * logit
    copied = kv_width * loaded.context_length * loaded.dtype.itemsize if config.overflow_bytes not in ("auto", 0) else 0
    return activations + logits + copied + _LIBRARIES_BYTES


def new_pool(
    loaded: LoadedModel, tokens: int, overflow: Overflow | None = None, ranks: RankProcesses | None = None
) -> KVPool:
    """Build a pool of ``tokens`` tokens, with the attention kernels of its device."""
    shape, windows = (loaded.layers, loaded.kv_heads, loaded.head_dim), loaded.windows
    if ranks is None:
        pool = KVPool(*shape, tokens, loaded.dtype, loaded.device, windows, overflow)
    else:
        pool = ParallelKVPool(ranks, *shape, tokens, loaded.dtype, loaded.device, windows)
    kernels = ops.find_attention_kernels(loaded.device, loaded.dtype, loaded.head_dim)
    if kernels is not None:
        pool.native = make_cuda_attention(pool, kernels, loaded.heads, find_library_attention(loaded.device))
        log.info(
            "attention kernels",
            ours=sorted(pool.native.kinds),
            long_prompts="ours" if pool.native.library is None else "PyTorch's FlashAttention-2",
        )
    return pool
