"""Namespace of a vLLM engine: everything that determines the bytes of its chunks."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch
import vllm

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry
from kvsidecar.integrations.torch_numerics import SHARED
from kvsidecar.integrations.vllm.rope_parameters import rope_parameters
from kvsidecar.integrations.weights_dir import weights_dir_of
from kvsidecar.models import weights_fingerprint

log = logging.getLogger("vllm.kvsidecar")

# Fields of the model's configuration that do not affect the fingerprint. Path and version do not change the computed
# values, and the descriptor has the dtype in another field.
_IGNORED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


def descriptor(config: Any, geometry: Geometry, backend: str, rank: int, numerics: str) -> NamespaceDescriptor:
    """Return the namespace of one tensor-parallel rank.

    ``config`` is the ``VllmConfig``; ``numerics`` is the result of ``torch_numerics``. Raises ConfigurationError.
    """
    model = config.model_config
    return NamespaceDescriptor(
        model_fingerprint=_fingerprint(config),
        architecture=model.architecture,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
        rope_parameters=rope_parameters(model.hf_text_config.to_dict(), model.max_model_len),
        format_version=keys.FORMAT_VERSION,
        quantizer_version=0 if geometry.bits == 16 else keys.QUANTIZER_VERSION,
        bits=geometry.bits,
        tensor_parallel_rank=rank,
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        producer=_producer(backend, f"{model.dtype} {model.quantization}", numerics),
    )


def _producer(backend: str, weights: str, numerics: str) -> str:
    if numerics == SHARED:  # engines then share chunks whatever their versions and kernels
        return f"vllm {weights} {SHARED}"
    return f"vllm/{vllm.__version__} torch/{torch.__version__} {backend} {weights} {numerics}"


def _fingerprint(config: Any) -> bytes:
    """Return a hash of the model configuration and of all weights."""
    model, load = config.model_config, config.load_config
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in _IGNORED}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    if load.load_format == "dummy":  # vLLM's dummy weights are random, but equal in every process
        digest.update(b"dummy")
    else:
        folder = weights_dir_of(model.model, load.download_dir, model.revision)
        digest.update(weights_fingerprint.of_engine_directory(folder, log.info))
    return digest.digest()
