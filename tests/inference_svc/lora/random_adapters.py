"""Random LoRA adapters in PEFT's format, and models with such an adapter merged into their weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_svc.lora.adapter_dir import open_adapter_dir
from inference_svc.lora.adapter_weights import AdapterWeights, Linears, linears_of, read_weights
from inference_svc.models.attention_windows import ATTENTION_NAME
from inference_svc.models.loader import LoadedModel

ATTENTION_ONLY = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
ALL = (*ATTENTION_ONLY, "gate_proj", "up_proj", "down_proj", "gate_up_proj")
RANK, ALPHA = 6, 9.0


def linears(loaded: LoadedModel) -> Linears:
    return linears_of(loaded.config, loaded.dtype, ATTENTION_NAME)


def tensors(layers: Linears, seed: int, targets: Iterable[str] = ALL, rank: int = RANK) -> dict[str, Tensor]:
    """Return random matrices, large enough to change every answer, by their names in the file."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for path, (outputs, inputs) in layers.items():
        if path.rpartition(".")[2] in targets:
            for which, shape, size in (("lora_A", (rank, inputs), inputs), ("lora_B", (outputs, rank), rank)):
                weight = torch.randn(shape, generator=generator) * 0.5 * size**-0.5
                found[f"base_model.model.{path}.{which}.weight"] = weight
    return found


def write(folder: Path, weights: dict[str, Tensor], **settings: Any) -> Path:
    """Write the folder of an adapter with these weights; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".")[-3] for name in weights})
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(said | settings))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def write_header(folder: Path, shape: str) -> None:
    """Replace a folder's weights by a header with one tensor of this shape, which is JSON."""
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    header = f'{{"{key}": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 8]}}}}'.encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def adapter(folder: Path, loaded: LoadedModel, name: str = "a") -> AdapterWeights:
    """Load the adapter in a folder for a model."""
    return read_weights(open_adapter_dir(name, folder), linears(loaded), loaded.id)


def merge(model: Any, folder: Path, scale: float = ALPHA / RANK) -> Any:
    """Merge an adapter into the weights of a model in float32; return the model."""
    weights = load_file(folder / "adapter_model.safetensors")
    for name in [n for n in weights if "lora_A" in n]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = weights[name.replace("lora_A", "lora_B")].float() @ weights[name].float() * scale
        weight = model.get_submodule(path).weight
        weight.data = (weight.data.float() + delta).to(weight.dtype)
    return model
