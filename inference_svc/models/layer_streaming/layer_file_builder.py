"""Builds layer files: writes a model in kernel layout, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import structlog
import torch
from kvkernels.cpu import f32_gemm
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.model_library import SOURCE, check_disk_space
from kvsidecar.process.malloc_tuning import trim_freed_memory
from torch import Tensor, nn

from inference_svc.models import fused_layer_weights
from inference_svc.models.layer_streaming import onednn_weights
from inference_svc.models.layer_streaming.layer_file import LayerWriter, StoredWeight
from inference_svc.models.layer_streaming.vocabulary_writer import EMBEDDING, HEAD, VocabularyWriter
from inference_svc.models.layer_streaming.weight_form import StreamableLinear, bytes_of, form_of
from inference_svc.models.layer_streaming.weight_source import WeightSource
from inference_svc.models.linear.dense_linear import pack_linears
from inference_svc.models.linear.plain_linear import plain_linears
from inference_svc.models.linear.quantized_linear import quantize_linear
from inference_svc.models.meta_model import build_meta_model
from inference_svc.models.progress_bar import progress_bar

log = structlog.get_logger("model")

# Prefixes of a layer's products that are not part of attention, in fused layers and in the models' own layers.
_FEED_FORWARD = ("gate_up", "down", "mlp.")
_NORM, _LAYER = "model.norm.", "model.layers.{}."


def is_feed_forward(name: str) -> bool:
    """True if a product of a layer belongs to its feed-forward part."""
    return name.startswith(_FEED_FORWARD)


@dataclass(frozen=True)
class LayerFileRecipe:
    """Configuration, weights and width from which a model's layers are built."""

    config: Any
    attention: str
    dtype: torch.dtype
    bits: int  # width of linear weights that the checkpoint does not quantize
    weight_source: Callable[[], WeightSource]
    name: str
    source: str  # the original file, or the name of a random model
    on_device: bool = False  # another device than the CPU computes: of the CPU kernels' layouts, only codes are used
    own_head: bool = False  # the head is not tied to the embedding, although the checkpoint's config.json says so

    def meta_model(self) -> Any:
        return build_meta_model(self.config, self.dtype, self.attention)

    @property
    def packs(self) -> bool:
        """True if oneDNN packs weights that are not quantized."""
        on_cpu = self.dtype == torch.bfloat16 and not self.on_device
        return on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    @property
    def narrows(self) -> bool:
        """True if weights that are not quantized use the narrowest exact format of our CPU kernels."""
        return f32_gemm.serves(self.dtype) and not self.on_device

    @property
    def tied(self) -> bool:
        return bool(self.config.tie_word_embeddings)


def build_layer_file(folder: Path, recipe: LayerFileRecipe, size: int) -> None:
    """Write the layer file of about ``size`` bytes into an empty folder.

    Memory holds at most one layer and one of its weights in its original form, or the head if oneDNN packs the head.
    Raises ModelUnsupported, and ConfigurationError if the disk is too small.
    """
    if recipe.packs and recipe.bits == 16 and not onednn_weights.available():
        raise ModelUnsupported(
            f"torch {torch.__version__} makes no packed weights over memory of ours, which streaming bfloat16 needs; "
            "--weights 8, --weights 4 and --dtype float32 do without them"
        )
    model = recipe.meta_model()
    check_disk_space(
        f"writing the layers of {recipe.name} out", size, folder.parent, "; XDG_DATA_HOME names another place"
    )
    log.info("writing layers out for streaming, once", model=recipe.name, size=format_size(size))
    about = {"path": recipe.source, "size": size}
    (folder / SOURCE).write_text(json.dumps(about) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"architectures": [type(model).__name__]}), encoding="utf-8")
    with LayerWriter(folder) as out, progress_bar("writing layers out") as progress:
        _LayerFileBuilder(model, recipe, out).run(lambda: progress(min(out.written, size), size))
    trim_freed_memory()


class _LayerFileBuilder:
    def __init__(self, model: Any, recipe: LayerFileRecipe, out: LayerWriter) -> None:
        self._model, self._recipe, self._out = model, recipe, out
        self._materials = recipe.weight_source()
        self._fused: bool | None = None

    def run(self, advanced: Any) -> None:
        model, recipe, out = self._model, self._recipe, self._out
        count = len(model.model.layers)
        layers: list[dict[str, StoredWeight]] = [{} for _ in range(count)]
        numbers = {_LAYER.format(i): i for i in range(count)}
        head: StoredWeight | None = None
        embedding: StoredWeight | None = None
        vocabulary = VocabularyWriter(
            model, recipe.dtype, recipe.bits, recipe.packs, recipe.narrows, self._materials, out
        )
        # The weight source must be read in the order of names.
        for prefix in sorted([EMBEDDING, _NORM, *numbers, *([] if recipe.tied else [HEAD])]):
            if prefix in numbers:
                i = numbers[prefix]
                layers[i] = self._layer(model.model.layers[i], prefix)
                model.model.layers[i] = nn.Identity()
                out.flush()
                # A layer does not fit into the free fragments of the previous layer's memory. Without trimming, memory
                # use grew to several layers.
                trim_freed_memory()
            elif prefix == _NORM:
                self._materials.fill(model.model.norm, prefix)
                self._vectors(model.model.norm, "norm.")
            elif prefix == HEAD:
                head = vocabulary.head()
            else:
                embedding, tied = vocabulary.embedding(recipe.tied)
                head = tied or head
            advanced()
        assert embedding is not None
        assert head is not None
        out.finish(bool(self._fused), layers, embedding, head)

    def _layer(self, layer: Any, prefix: str) -> dict[str, StoredWeight]:
        recipe = self._recipe
        if recipe.bits == 16:
            self._materials.fill(layer, prefix)
        else:
            self._fill_quantized(layer, prefix)
        can = not recipe.on_device and fused_layer_weights.can_fuse(layer, recipe.config)
        if self._fused not in (None, can):
            raise ModelUnsupported(f"{recipe.name} has layers of two kinds, which are not streamed; use --stream off")
        self._fused = can
        if can:
            taken, vectors = fused_layer_weights.take_weights(layer)
            products: dict[str, StreamableLinear] = {**taken}
        else:
            products, vectors = self._own(layer)
        start = prefix.removeprefix("model.")
        for name, product in products.items():
            if product.bias is not None:
                self._out.vectors[f"{start}{name}.bias"] = product.bias.clone()
        self._out.vectors |= {f"{start}{name}": vector.clone() for name, vector in vectors.items()}
        ordered = sorted(products.items(), key=lambda item: is_feed_forward(item[0]))
        return {name: self._put(product) for name, product in ordered}

    def _fill_quantized(self, layer: nn.Module, prefix: str) -> None:
        """Load and quantize weight by weight: an unquantized layer takes four times the memory."""
        for name, module in sorted(layer.named_modules(), key=lambda item: item[0]):
            if next(module.parameters(recurse=False), None) is not None:
                self._materials.fill(module, f"{prefix}{name}.")
                quantize_linear(layer, name, self._recipe.bits)

    def _own(self, layer: nn.Module) -> tuple[dict[str, StreamableLinear], dict[str, Tensor]]:
        """Linear layers and other parameters of a layer that is not fused."""
        if self._recipe.on_device:
            plain_linears(layer)
        else:
            pack_linears(layer)
        products = {name: m for name, m in layer.named_modules() if isinstance(m, get_args(StreamableLinear))}
        vectors = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        large = next((name for name, vector in vectors.items() if vector.dim() > 1), None)
        if large is not None:
            raise ModelUnsupported(f"{self._recipe.name} has a weight {large}, which is not streamed; --stream off")
        return products, vectors

    def _put(self, product: nn.Module) -> StoredWeight:
        return self._out.put(bytes_of(product), form_of(product))

    def _vectors(self, module: nn.Module, start: str) -> None:
        self._out.vectors |= {f"{start}{name}": p.detach().clone() for name, p in module.named_parameters()}
