"""Worker model: the model, pool and policies that a process computes with, from its settings.

Rank 0 and the other ranks of a tensor-parallel worker build them in the same way.
"""

from __future__ import annotations

from dataclasses import replace

import structlog
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

from inference_svc.context_reuse.chunking import new_chunker
from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.context_reuse.rope_shift import rope_shift_of, why_not_shiftable
from inference_svc.context_reuse.selectors import SELECTORS
from inference_svc.context_reuse.text_structure import TextStructure
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.numerics_probe import with_numerics_identity
from inference_svc.models.batch_invariance_probe import batch_variant_shapes, packed_linears_of
from inference_svc.models.draft_loader import COPY_BITS
from inference_svc.models.layer_streaming.residency_plan import StreamingOptions
from inference_svc.models.linear.dense_linear import becomes_dense
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.loader import LoadedModel, load
from inference_svc.models.model_check import SELF
from inference_svc.models.tensor_parallel.rank_group import RankGroup
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.tensor_parallel.rank_processes import num_threads

log = structlog.get_logger("worker")

PROBED_ROWS = (64,)
_NAME_LENGTH = 64


def load_model(config: WorkerConfig, adapter_bytes: int, group: RankGroup | None) -> LoadedModel:
    """Load the configured model, or one rank's part of it. ``adapter_bytes``: memory to leave for adapters.

    Raises ConfigurationError, ModelUnsupported.
    """
    return load(
        config.model,
        device=config.device if group is None else str(group.device),
        dtype=config.dtype,
        weights=config.weights,
        strict=config.strict,
        served_name=config.public_name,
        context_length=config.context_length,
        stream=StreamingOptions(
            config.stream if group is None else "off",
            config.keep_first,
            config.keep_last,
            config.stream_slots,
            config.memory_bytes,
            config.planned_pool_bytes,
            config.batch_sequences,
            beside_bytes=adapter_bytes,
            copy_bits=COPY_BITS if config.draft_model == SELF else 0,
        ),
        ranks=group,
    )


def prepare_model(config: WorkerConfig, loaded: LoadedModel) -> LoadedModel:
    """Apply the configured context length, and warn of products whose bits depend on the batch."""
    if config.context_length:
        if config.context_length > loaded.context_length:
            raise ConfigurationError(
                f"context_length is {config.context_length}; the model allows at most {loaded.context_length}"
            )
        loaded = replace(loaded, context_length=config.context_length)
    if loaded.device.type == "cpu":
        _probe_batch_invariance(loaded)
    return loaded


def probe_numerics(config: WorkerConfig, loaded: LoadedModel, decoder: Decoder, pool: KVPool) -> LoadedModel:
    """Return the model with its numerics identity. All ranks of a worker must call it at the same time."""
    return with_numerics_identity(
        loaded,
        decoder,
        config.storage_bits,
        shared=config.share_across_machines,
        threads=num_threads(config),
        native=pool.native,
    )


def _probe_batch_invariance(loaded: LoadedModel) -> None:
    if loaded.streamed is None:
        bad = batch_variant_shapes((p for p in packed_linears_of(loaded.model) if not becomes_dense(p)), PROBED_ROWS)
    else:
        with loaded.streamed.source.acquire_layer(0):
            bad = batch_variant_shapes(packed_linears_of(loaded.streamed.products), PROBED_ROWS)
            for product in loaded.streamed.products.modules():
                if isinstance(product, PackedLinear):
                    product.reset_kernel()
    warn_batch_variance(bad, loaded)


def warn_batch_variance(bad: list[str], loaded: LoadedModel) -> None:
    """Log the products that give a row other bits in another batch."""
    if bad:
        log.warning(
            "a row's bits depend on its batch on this CPU, so answers with the cache may differ in their last bits; "
            "kvsidecar doctor says more",
            products=bad,
            dtype=str(loaded.dtype),
        )


def reuse_policy(config: WorkerConfig, loaded: LoadedModel) -> ReusePolicy:
    """Build the worker's chunking and reuse policy."""
    separator: list[int] = []
    if config.document_separator:
        separator = loaded.tokenizer(config.document_separator, add_special_tokens=False)["input_ids"]
    # Detokenizing a large vocabulary takes a second, so this is done only for the chunker that needs it.
    ends = loaded.sentence_ends() if config.chunking == "boundary" else frozenset[int]()
    structure = TextStructure.of(loaded.tokenizer) if config.chunking == "content_defined" else None
    chunker = new_chunker(config.chunking, config.chunk_tokens, separator, ends, structure)
    why = why_not_movable(loaded)
    rotary = None if why else rope_shift_of(loaded.model)
    return ReusePolicy(
        chunker,
        rotary,
        SELECTORS.get(config.repair),
        config.repair_ratio,
        config.reuse_anywhere,
        config.unverified_reuse,
    )


def why_not_movable(loaded: LoadedModel) -> str:
    """Reason why stored keys are not reused at other positions; empty if they may be."""
    if loaded.shard is not None:
        return "the ranks of a tensor-parallel worker reuse prefixes only"
    return why_not_shiftable(loaded.config)


def daemon_connection(
    address: ServiceAddress, config: WorkerConfig, loaded: LoadedModel, fingerprint: bytes, adapter: str
) -> DaemonConnection:
    """Open the connection for an adapter's name and fingerprint; both are empty for the model."""
    return DaemonConnection(
        address,
        f"{config.name}:{adapter}"[:_NAME_LENGTH] if adapter else config.name,
        loaded.descriptor(config.storage_bits, fingerprint),
        (loaded.device.index or 0) if loaded.device.type == "cuda" else None,
        log=structlog.get_logger("cache", **({"adapter": adapter} if adapter else {})),
    )
