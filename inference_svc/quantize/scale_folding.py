"""Quantizes decoder layers, folding input scales into the preceding modules.

The preceding module then produces its outputs divided by the scale: a norm has a divided weight, a linear layer has
divided rows. So the model needs no additional operations. The pairs of modules are the same as in AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from kvsidecar.errors import ModelUnsupported
from torch import Tensor, nn

from inference_svc.quantize.awq_rounding import GROUPS, QuantizedWeight, quantize_weight
from inference_svc.quantize.scale_search import InputStats, best_scale, best_shrink, output_error

# Architectures whose decoder layers consist of the same parts.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class Fold:
    """Linear layers that share an input, and the module that produces it."""

    producer: str
    consumers: tuple[str, ...]


_FOLDS = (
    Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Fold("self_attn.v_proj", ("self_attn.o_proj",)),
    Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Fold("mlp.up_proj", ("mlp.down_proj",)),
)
# The quantized layers, grouped by common input.
INPUTS = tuple(fold.consumers for fold in _FOLDS)
LINEARS = tuple(name for readers in INPUTS for name in readers)
# An attention score is a product of two outputs of these layers, and a few large weights dominate the score. AutoAWQ
# does not clip these layers either.
_NEVER_CLIPPED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True)
class QuantizedLayer:
    """A decoder layer's 4-bit weights by name, and their mean output errors.

    Errors are shares of the outputs' mean square, with plain rounding and with AWQ.
    """

    weights: dict[str, QuantizedWeight]
    plain_error: float
    error: float


def check_quantizable(architecture: str, config: Any) -> None:
    """Raise ModelUnsupported for an unknown architecture or an already quantized model."""
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method:
        raise ModelUnsupported(f"the model is quantized already ({method}); give the model that it was made of")
    if architecture not in FAMILIES:
        raise ModelUnsupported(f"{architecture} cannot be quantized; allowed are {', '.join(FAMILIES)}")


def linear_of(layer: nn.Module, name: str) -> nn.Linear:
    """Return one of ``LINEARS`` of a decoder layer."""
    return cast(nn.Linear, layer.get_submodule(name))


def group_of(layers: nn.ModuleList) -> int:
    """Choose the group size for all layers of a model, which may be on the meta device.

    Raises ModelUnsupported for shapes that the format does not support.
    """
    shapes = {name: linear_of(layers[0], name).weight.shape for name in LINEARS}
    for name, (outputs, inputs) in shapes.items():
        if inputs % GROUPS[-1] or outputs % 8:
            raise ModelUnsupported(
                f"{name} is {inputs} x {outputs}; the format takes inputs in multiples of {GROUPS[-1]} and outputs in "
                "multiples of 8"
            )
    return next(g for g in GROUPS if all(inputs % g == 0 for _, inputs in shapes.values()))


def round_plainly(layer: nn.Module, group: int) -> None:
    """Replace a layer's weights by the nearest 4-bit weights, in place."""
    for name in LINEARS:
        linear = linear_of(layer, name)
        linear.weight.data = quantize_weight(linear.weight.data, group).dense()


def quantize_layer(layer: nn.Module, inputs: Mapping[str, InputStats], group: int) -> QuantizedLayer:
    """Quantize a decoder layer in float32, in place, with input statistics for each of ``LINEARS``.

    Afterwards the layer computes with its dequantized 4-bit weights; other parameters are rounded to float16.
    """
    meant = {name: linear_of(layer, name).weight.data for name in LINEARS}
    scales = {name: torch.ones(meant[name].shape[1]) for name in LINEARS}
    for fold in _FOLDS:
        giver = layer.get_submodule(fold.producer)
        seen = inputs[fold.consumers[0]]
        if isinstance(giver, nn.Linear) and giver.out_features != len(seen.magnitude):
            continue  # grouped-query attention: several query heads share a value head, and no scale fits all of them
        found = best_scale([meant[name] for name in fold.consumers], seen, group).values
        found = _folded(giver, found)
        scales |= dict.fromkeys(fold.consumers, found)
    weights: dict[str, QuantizedWeight] = {}
    plain: list[float] = []
    errors: list[float] = []
    for name in LINEARS:
        linear, scale, products = linear_of(layer, name), scales[name], inputs[name].products
        # Dividing rows by their consumers' scale divides their errors, too.
        rows = _output_scale(name, scales, linear)
        scaled = meant[name] * scale / rows
        shrink = None if name in _NEVER_CLIPPED else best_shrink(scaled, products / scale / scale[:, None], group)
        weights[name] = quantize_weight(scaled, group, shrink)
        linear.weight.data = weights[name].dense()
        size = float(output_error(meant[name], products).sum().clamp_min(1e-20))
        for into, now in (
            (errors, linear.weight.data * rows / scale),
            (plain, quantize_weight(meant[name], group).dense()),
        ):
            into.append(float(output_error(now - meant[name], products).sum()) / size)
    for name, parameter in layer.named_parameters():
        if name.removesuffix(".weight") not in LINEARS:
            parameter.data = parameter.data.half().float()
    return QuantizedLayer(weights, sum(plain) / len(plain), sum(errors) / len(errors))


def _folded(giver: nn.Module, scale: Tensor) -> Tensor:
    """Divide a module's outputs by a scale, in place, and return the exact divisor.

    A norm's divided weight is rounded so that bfloat16 and float16 both represent it. The weights of the consumers
    compensate for this rounding exactly.
    """
    if isinstance(giver, nn.Linear):
        if giver.bias is not None:
            giver.bias.data = giver.bias.data / scale
        return scale  # exact, because the rows of the weight are divided before rounding
    before = cast(Tensor, giver.weight).data
    after = (before / scale).bfloat16().half().float()
    lost = (after == 0) | ~after.isfinite()
    cast(Tensor, giver.weight).data = torch.where(lost, before, after)
    return torch.where(lost, 1.0, before / after)


def _output_scale(name: str, scales: Mapping[str, Tensor], linear: nn.Module) -> Tensor:
    """Divisor of a linear layer's outputs, ``[out, 1]``."""
    readers = [fold.consumers[0] for fold in _FOLDS if fold.producer == name]
    found = [scales[r] for r in readers if len(scales[r]) == linear.out_features]
    return found[0][:, None] if found else torch.ones(1, 1)
