"""Estimates the memory of a model's weights before any weight is packed.

The packed size of a product follows from its shape and from a sample of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvkernels.cpu import code_recovery, quantized_gemm
from kvkernels.cpu import f32_gemm as dense
from torch import nn

from inference_svc.models import fused_layer_weights
from inference_svc.models.layer_streaming.layer_file import padded
from inference_svc.models.layer_streaming.layer_file_builder import LayerFileRecipe, is_feed_forward
from inference_svc.models.layer_streaming.residency_plan import WeightSizes
from inference_svc.models.layer_streaming.vocabulary_writer import EMBEDDING, HEAD
from inference_svc.models.linear.quantized_linear import quantization_of


@dataclass(frozen=True)
class SizeEstimate:
    """Size of a model in bytes."""

    dense: int  # every weight in its dtype
    sizes: WeightSizes  # as packed in memory and in the layer file
    embedding: int  # bytes of the embedding's rows that are not in ``sizes``; 0 if the head shares them

    @property
    def kept(self) -> int:
        """All packed weights."""
        return self.sizes.all + self.embedding


def estimate_sizes(recipe: LayerFileRecipe) -> SizeEstimate:
    """Estimate the sizes of a recipe's model.

    The estimate is exact except for oneDNN's padding, and except for weights whose sampled rows need less precision
    than other rows. Raises ModelUnsupported if a weight is missing.
    """
    model = recipe.meta_model()
    counting = _Counting(recipe)
    layers, vectors = [], sum(p.nbytes for p in model.model.norm.parameters())
    for i, layer in enumerate(model.model.layers):
        layers.append(counting.layer(layer, f"model.layers.{i}."))
        vectors += sum(p.nbytes for p in layer.parameters() if p.dim() < 2)
    embedding, head = counting.vocabulary(model)
    tied = f"{HEAD}weight" if recipe.tied else ""
    whole = {name: p.numel() for name, p in model.named_parameters() if name != tied}
    if recipe.tied and recipe.bits == 16 and not recipe.packs and not recipe.narrows:
        embedding = 0
    dense_bytes, always = sum(whole.values()) * recipe.dtype.itemsize, head + vectors
    if recipe.on_device:
        widened = counting.max_coded_weights * recipe.dtype.itemsize
        return SizeEstimate(dense_bytes, WeightSizes(layers, always + embedding, widened), 0)
    return SizeEstimate(dense_bytes, WeightSizes(layers, always), embedding)


class _Counting:
    def __init__(self, recipe: LayerFileRecipe) -> None:
        self._recipe, self._materials = recipe, recipe.weight_source()
        self.max_coded_weights = 0  # number of weights of the largest product in codes

    def layer(self, layer: nn.Module, prefix: str) -> tuple[int, int]:
        """Bytes of a layer's attention, and of its feed-forward part."""
        linears = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        products = {name: [name] for name in linears}
        if not self._recipe.on_device and fused_layer_weights.has_fusable_structure(layer, self._recipe.config):
            products = {name: list(parts) for name, parts in fused_layer_weights.FUSED_LINEARS.items()}
        found = [0, 0]
        for name, parts in products.items():
            found[is_feed_forward(name)] += self._product([linears[part] for part in parts], prefix, parts)
        found[1] += sum(p.nbytes for p in layer.parameters() if p.dim() > 2)  # experts are not packed
        return found[0], found[1]

    def vocabulary(self, model: Any) -> tuple[int, int]:
        """Bytes of the embedding, and of the head."""
        embedding, head, recipe = model.model.embed_tokens.weight, model.lm_head, self._recipe
        kept = self._kept(EMBEDDING + "weight", embedding.shape)
        rows = padded(embedding.numel() * dense.value_dtype(kept).itemsize)
        name = EMBEDDING if recipe.tied else HEAD
        return rows, self._product([head], "", [HEAD.removesuffix(".")], f"{name}weight")

    def _product(self, linears: list[nn.Linear], prefix: str, names: list[str], weight: str = "") -> int:
        recipe, materials = self._recipe, self._materials
        inputs, outputs = linears[0].in_features, sum(linear.out_features for linear in linears)
        full = [prefix + name for name in names]
        forms = [form for form in map(materials.form, full) if form is not None]
        found = (
            quantized_gemm.joined_form(forms)
            if len(forms) == len(full)
            else quantization_of(names[0].rpartition(".")[2], inputs, linears[0].out_features, recipe.bits)
        )
        if found is not None:
            self.max_coded_weights = max(self.max_coded_weights, inputs * outputs)
            return padded(quantized_gemm.size_bytes(inputs, outputs, *found))
        if recipe.packs or not recipe.narrows:
            return padded(inputs * outputs * recipe.dtype.itemsize)
        weights = [weight] if weight else [f"{name}.weight" for name in full]
        kinds = {self._kept(w, linear.weight.shape) for w, linear in zip(weights, linears, strict=True)}
        return padded(dense.size_bytes(inputs, outputs, _together(kinds)))

    def _kept(self, name: str, shape: torch.Size) -> str:
        if self._recipe.narrows:
            return self._materials.kept(name, shape)
        return str(self._recipe.dtype).removeprefix("torch.")


def _together(kinds: set[str]) -> str:
    """Format of a weight that is joined from weights of these formats."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return max(kinds, key=code_recovery.BITS.__getitem__) if kinds <= code_recovery.BITS.keys() else "float32"
