"""Pool builder: the size of a worker's KV pool, and the pool."""

from __future__ import annotations

import structlog
from kvkernels import ops
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.overflow import Overflow
from inference_svc.model_runner.cuda_attention import find_library_attention, make_cuda_attention
from inference_svc.models.loader import LoadedModel
from inference_svc.server.overflow_builder import open_overflow
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.tensor_parallel.parallel_decoder import ParallelKVPool
from inference_svc.tensor_parallel.rank_processes import RankProcesses

log = structlog.get_logger("worker")


def build_pool(config: WorkerConfig, loaded: LoadedModel, ranks: RankProcesses | None = None) -> KVPool:
    """Build the KV pool. All ranks get the same number of blocks; their pools take ``pool_bytes`` together."""
    shard = loaded.shard
    kv_heads = loaded.kv_heads if shard is None else max(shard.all_kv_heads, shard.size)
    per_token = KVPool.bytes_per_token(loaded.layers, kv_heads, loaded.head_dim, loaded.dtype)
    tokens = config.pool_bytes // per_token
    if tokens < 4 * PAGE_TOKENS:
        raise ConfigurationError(
            f"pool_bytes is {config.pool_bytes}; this model needs {format_size(per_token)} per token, "
            f"at least {format_size(4 * PAGE_TOKENS * per_token)}"
        )
    # Upper bound: the tokens of a full batch of the longest sequences.
    tokens = min(tokens, config.batch_sequences * loaded.context_length)
    return new_pool(loaded, tokens, open_overflow(config, loaded, tokens) if shard is None else None, ranks)


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
