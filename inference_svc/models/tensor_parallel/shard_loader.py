"""Shard loader: builds a model that has one rank's part of the weights, and reads no other part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.checkpoint_files import tensor_files
from safetensors import safe_open
from torch import Tensor, nn

from inference_svc.models.layer_streaming.weight_source import fill_random
from inference_svc.models.meta_model import build_meta_model, set_generation_config
from inference_svc.models.safetensors_reader import shape_in
from inference_svc.models.surplus_weights import check_surplus
from inference_svc.models.tensor_parallel.shard_plan import Part, ShardPlan

# Reads the given ranges of one dimension of a parameter. Without a dimension, reads the whole parameter.
_Read = Callable[[str, int, list[Part]], Tensor]
_BIASES_OF_RANK_0 = ("o_proj.bias", "down_proj.bias")


def load_shard(
    folder: Path, config: Any, dtype: torch.dtype, attention: str, device: torch.device, plan: ShardPlan
) -> Any:
    """Loads one rank's slices of a folder's safetensors. Raises ModelUnsupported."""
    model, where = build_meta_model(config, dtype, attention), tensor_files(folder)
    missing = dict(model.named_parameters()).keys() - where.keys()
    if missing:
        raise ModelUnsupported(
            f"tensor_parallel_size is {plan.size}, and the files in {folder} have no {sorted(missing)[0]}; use 1"
        )
    check_surplus(folder, model, where)

    def read(name: str, dim: int, parts: list[Part]) -> Tensor:
        with safe_open(where[name], "pt") as data:
            found = data.get_slice(name)
            cut = [found[first:end] if dim == 0 else found[:, first:end] for first, end in parts]
        return (cut[0] if len(cut) == 1 else torch.cat(cut, dim)).to(device).to(dtype)

    _set_slices(model, plan, read, lambda name: tuple(shape_in(where, name)))
    set_generation_config(model, folder)
    return model


def random_shard(
    config: Any, dtype: torch.dtype, attention: str, device: torch.device, seed: int, plan: ShardPlan
) -> Any:
    """Builds one rank's part of a model with random weights: the same numbers as the whole model's."""
    model = build_meta_model(config, dtype, attention)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    generator, whole = torch.Generator().manual_seed(seed), dict[str, Tensor]()

    def read(name: str, dim: int, parts: list[Part]) -> Tensor:
        cut = [whole[name].narrow(dim, first, end - first) for first, end in parts]
        return torch.cat(cut, dim).to(device)

    for name in sorted(shapes):
        whole[name] = torch.empty(shapes[name], dtype=dtype)
        fill_random(name, whole[name], generator)
        _set_slice(model, plan, name, read, shapes[name])
        del whole[name]
    _describe(model, plan)
    return model


def _set_slices(model: Any, plan: ShardPlan, read: _Read, shape_of: Callable[[str], tuple[int, ...]]) -> None:
    for name, _ in list(model.named_parameters()):
        _set_slice(model, plan, name, read, shape_of(name))
    _describe(model, plan)


def _set_slice(model: Any, plan: ShardPlan, name: str, read: _Read, shape: tuple[int, ...]) -> None:
    """Set this rank's part of a parameter; ``shape`` is the shape of the whole parameter."""
    found = plan.slices_of(name, shape)
    dim, parts = found or (0, [(0, shape[0])])
    weight = read(name, dim, parts)
    if plan.rank and name.endswith(_BIASES_OF_RANK_0):
        weight = torch.zeros_like(weight)
    path, _, field = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, field, nn.Parameter(weight, requires_grad=False))
    if plan.is_full_width_norm(name, shape):
        module.all_channels = shape[0]
    if isinstance(module, nn.Linear) and field == "weight":
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.padding_idx = len(weight), None


def _describe(model: Any, plan: ShardPlan) -> None:
    """Sets the numbers of heads and channels of a model whose parameters are slices."""
    model.tie_weights()
    config, head = model.config, model.lm_head
    head.out_features, head.in_features = head.weight.shape
    config.num_attention_heads, config.num_key_value_heads = plan.num_heads, plan.num_kv_heads
    config.head_dim, config.intermediate_size = plan.head_dim, plan.num_channels
    for layer in model.model.layers:
        attention = layer.self_attn
        if hasattr(attention, "q_layernorm"):
            raise ModelUnsupported(
                f"tensor_parallel_size is {plan.size}, and norms for each head are not divided among ranks; use 1"
            )
        attention.num_heads, attention.num_key_value_heads = plan.num_heads, plan.num_kv_heads
        attention.num_key_value_groups = plan.num_heads // plan.num_kv_heads
