"""Weights of fused decoder layers: Llama-like layers in the form of the kernels.

Query, key and value projections are joined to one product, and gate and up projections to another.
``model_runner.fused_layers`` computes with these weights; layer streaming stores and loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from kvkernels.cpu import cpu_attention as kernel
from kvkernels.cuda import layer_rows
from torch import Tensor, nn

from inference_svc.models.attention_windows import window_of
from inference_svc.models.linear.dense_linear import DenseLinear, linear_for
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import PlainLinear
from inference_svc.models.linear.quantized_linear import QuantizedLinear, can_join, join_linears
from inference_svc.models.tensor_parallel.parallel_layers import RowParallelLinear

_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
# Linear layers of each fused product, in the order of its outputs.
FUSED_LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
Joined = PackedLinear | QuantizedLinear | DenseLinear | PlainLinear

LinearFn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerWidths:
    """Numbers of query heads and KV heads, head dimension, and width of the feed-forward part."""

    heads: int
    kv_heads: int
    dim: int
    inner: int


@dataclass
class FusedLayerWeights:
    """Weights of one fused layer."""

    qkv: LinearFn
    o: LinearFn
    gate_up: LinearFn
    down: LinearFn
    input_norm: Tensor
    post_norm: Tensor
    head_norms: tuple[Tensor | None, Tensor | None]
    epsilon: float
    scale: float
    window: int | None


def can_fuse_model(model: Any) -> bool:
    """True if all layers of a model can be fused.

    The layers must be on a CPU and have a known structure, with SiLU gates and with RoPE over whole heads.
    """
    return all(can_fuse(layer, model.config) for layer in model.model.layers)


def can_fuse_model_on_device(model: Any) -> bool:
    """True if all layers of a model on a device can be fused: a known structure, and plain linear layers."""
    config = model.config
    return layer_rows.supports(config.hidden_size, config.intermediate_size, head_dim(config)) and all(
        _has_known_structure(layer, config)
        and layer.input_layernorm.weight.dtype in (torch.float16, torch.bfloat16)
        and all(type(layer.get_submodule(path)) is nn.Linear for paths in FUSED_LINEARS.values() for path in paths)
        for layer in model.model.layers
    )


def can_fuse(layer: Any, config: Any) -> bool:
    """True if one layer can be fused."""
    return has_fusable_structure(layer, config) and layer.input_layernorm.weight.device.type == "cpu"


def has_fusable_structure(layer: Any, config: Any) -> bool:
    """True if one layer can be fused once it is on a CPU."""
    if not _has_known_structure(layer, config):
        return False
    dtype = layer.input_layernorm.weight.dtype
    return (
        dtype in (torch.float32, torch.bfloat16)
        and kernel.serves(dtype, head_dim(config))
        and all(can_join(parts) for parts in _together(layer))
    )


def _has_known_structure(layer: Any, config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        type(layer).__name__ in _LAYERS
        and config.hidden_act == "silu"
        and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
    )


def _together(layer: Any) -> list[list[Any]]:
    """List the linear layers that share an input."""
    return [[layer.get_submodule(path) for path in FUSED_LINEARS[name]] for name in ("qkv", "gate_up")]


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _join(parts: list[Any]) -> Joined:
    """Join linear layers over the same input to one product; the parts may then be freed."""
    if isinstance(parts[0], QuantizedLinear):
        return join_linears(parts)
    weight = torch.cat([p.weight for p in parts])
    bias = torch.cat([p.bias for p in parts]) if parts[0].bias is not None else None
    return linear_for(weight, bias)


def _packed(linear: Any) -> Joined | RowParallelLinear:
    """Pack one linear layer. Of a row-parallel layer, pack the product of this rank."""
    if not isinstance(linear, RowParallelLinear):
        return _join([linear])
    linear.local = _join([linear.local])
    return linear


def norm_weight(norm: Any) -> Tensor:
    return norm.weight.detach().float().contiguous()  # type: ignore[no-any-return]


def take_weights(layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take products and norms out of a layer, by field name.

    Drops its linear modules, so that memory holds each weight once.
    """
    a, m = layer.self_attn, layer.mlp
    qkv, gate_up = _together(layer)
    products = {"qkv": _join(qkv), "o": _packed(a.o_proj), "gate_up": _join(gate_up), "down": _packed(m.down_proj)}
    norms = {"input_norm": norm_weight(layer.input_layernorm), "post_norm": norm_weight(layer.post_attention_layernorm)}
    if hasattr(a, "q_norm"):
        norms |= {"q_norm": norm_weight(a.q_norm), "k_norm": norm_weight(a.k_norm)}
    for module, names in ((a, ("q_proj", "k_proj", "v_proj", "o_proj")), (m, ("gate_proj", "up_proj", "down_proj"))):
        for name in names:
            setattr(module, name, nn.Identity())
    return products, norms


def make_layer(layer: Any, products: Mapping[str, LinearFn], norms: Mapping[str, Tensor]) -> FusedLayerWeights:
    """Build a fused layer from the weights that were taken out of ``layer``.

    ``layer`` itself contributes only its constants, such as the epsilon of its norms.
    """
    a = layer.self_attn
    return FusedLayerWeights(
        qkv=products["qkv"],
        o=products["o"],
        gate_up=products["gate_up"],
        down=products["down"],
        input_norm=norms["input_norm"],
        post_norm=norms["post_norm"],
        head_norms=(norms.get("q_norm"), norms.get("k_norm")),
        epsilon=float(layer.input_layernorm.variance_epsilon),
        scale=float(a.scaling),
        window=window_of(a),
    )


def linear_form(product: Any) -> tuple[object, ...]:
    """Return a key of a product's computation: products that differ only in weights have equal keys."""
    kept, stored = getattr(product, "quantized", None), getattr(product, "dense", None)
    width = (kept.bits, kept.group) if kept is not None else getattr(stored, "kept", "")
    return type(product).__name__, product.in_features, product.out_features, product.bias is not None, width
