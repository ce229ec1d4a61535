"""Adapter weights: read, checked against a model's layers, and hashed for the namespace."""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from kvsidecar.errors import ConfigurationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from inference_svc.lora.adapter_dir import MAX_HEADER_BYTES, WEIGHTS, AdapterDir
from inference_svc.lora.peft_config import CONFIG, PatternRefused
from inference_svc.models.meta_model import build_meta_model

# Part of fingerprints. Raise the number when a code change alters the bits of an adapter's products: chunks with the
# old number are then not reused.
_PURPOSE = b"kvsidecar/lora/1"
_LAYERS = "model.layers."
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Linears = Mapping[str, tuple[int, int]]
"""Output and input sizes of a model's linear layers, by path."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank addition to a layer's weight: ``scale * up [outputs, rank] @ down [rank, inputs]``."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """Weights of an adapter for a model whose linear layers are ``linears``.

    ``fingerprint`` depends only on the weights, not on the adapter's name or folder.
    """

    name: str
    layers: Mapping[str, LowRank]
    linears: Linears
    fingerprint: bytes


def linears_of(config: Any, dtype: torch.dtype, attention: str) -> Linears:
    """Finds the linear layers of a model from its configuration, without loading weights."""
    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    model = build_meta_model(config, dtype, attention)
    return {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if type(module) is nn.Linear and path.startswith(_LAYERS)
    }


def read_weights(folder: AdapterDir, linears: Linears, model: str) -> AdapterWeights:
    """Read an adapter for ``model``.

    Raises ConfigurationError for an adapter of another model, and for a file that is damaged or contradicts its
    configuration.
    """
    try:
        return _read(folder, linears, model)
    except PatternRefused as error:
        raise ConfigurationError(f"LoRA adapter {folder.name}: {folder.path / CONFIG} {error}") from error


def _read(folder: AdapterDir, linears: Linears, model: str) -> AdapterWeights:
    settings, pairs = folder.peft, folder.pairs()
    meant = f"; it was made for {settings.base_model_name_or_path}" if settings.base_model_name_or_path else ""
    for path in pairs:
        if path not in linears:
            raise folder.refusal(f"has weights for {path}, which is no linear layer in the layers of {model}{meant}")
        if not settings.targets(path):
            raise folder.refusal(f"has weights for {path}, which target_modules does not name")
    lacking = next((path for path in linears if settings.targets(path) and path not in pairs), None)
    if lacking is not None:
        raise folder.refusal(f"has no weights for {lacking}, which target_modules names{meant}")
    found: dict[str, LowRank] = {}
    try:
        size = (folder.path / WEIGHTS).stat().st_size
        if size > folder.max_bytes + MAX_HEADER_BYTES:
            raise folder.refusal(f"cannot be read: it has {size} bytes, more than its tensors take")
        # Not memory-mapped: if another process truncated the file, a mapped read would kill this process.
        tensors = load((folder.path / WEIGHTS).read_bytes())
        for path in sorted(pairs):
            down, up = (tensors[key] for key in pairs[path])
            _check(folder, path, down, up, linears[path], f" in {model}{meant}")
            found[path] = LowRank(down, up, settings.scale(path))
    except (OSError, SafetensorError) as error:
        raise folder.refusal(f"cannot be read: {error}") from error
    except KeyError as error:
        raise folder.refusal(f"was changed while it was read: it has no {error.args[0]} any more") from error
    return AdapterWeights(folder.name, found, linears, _fingerprint(found))


def _check(folder: AdapterDir, path: str, down: Tensor, up: Tensor, shape: tuple[int, int], where: str) -> None:
    (outputs, inputs), rank = shape, folder.peft.rank(path)
    for name, tensor, wanted in (("lora_A", down, (rank, inputs)), ("lora_B", up, (outputs, rank))):
        if tuple(tensor.shape) != wanted:
            raise folder.refusal(
                f"has a {name} of shape {list(tensor.shape)} for {path}; with rank {rank} it must be {list(wanted)}"
                f"{where}"
            )
        if tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise folder.refusal(f"has {kind} in {name} of {path}; allowed are float32, float16 and bfloat16")
        if not bool(torch.isfinite(tensor).all()):
            raise folder.refusal(f"has a value in {name} of {path} that is no finite number")


def _fingerprint(layers: Mapping[str, LowRank]) -> bytes:
    """SHA-256 over paths, scales and every weight, with lengths."""
    digest = hashlib.sha256(_PURPOSE)
    for path, one in layers.items():
        name = path.encode()
        digest.update(struct.pack("<Id", len(name), one.scale) + name)
        for tensor in (one.down, one.up):
            kind = str(tensor.dtype).encode()
            digest.update(struct.pack("<IQQ", len(kind), *tensor.shape) + kind)
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
