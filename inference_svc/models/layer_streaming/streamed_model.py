"""Assembles streamed models: layer file, resident weights, empty layers, read-ahead."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from kvkernels.cpu import cpu_library, large_pages
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.models.model_library import ModelLibrary
from torch import Tensor

from inference_svc.models import fused_layer_weights
from inference_svc.models.attention_windows import windows_of
from inference_svc.models.fused_layer_weights import FusedLayerWeights
from inference_svc.models.layer_streaming import onednn_weights
from inference_svc.models.layer_streaming.device_slots import DeviceSlots
from inference_svc.models.layer_streaming.embedding_table import StoredEmbedding
from inference_svc.models.layer_streaming.layer_file import (
    CHECK_BYTES,
    VERSION,
    LayerFile,
    LayerFileDamaged,
    LayerIndex,
    StoredWeight,
    padded,
)
from inference_svc.models.layer_streaming.layer_file_builder import LayerFileRecipe, build_layer_file, is_feed_forward
from inference_svc.models.layer_streaming.layer_source import RESIDENT, LayerSource, StreamedLayers, Targets
from inference_svc.models.layer_streaming.read_ahead import ReadAhead, ReadAheadStats
from inference_svc.models.layer_streaming.residency_plan import (
    ResidencyPlan,
    StreamingOptions,
    WeightSizes,
    plan_residency,
    reserved_bytes,
)
from inference_svc.models.layer_streaming.size_estimate import estimate_sizes
from inference_svc.models.layer_streaming.weight_form import StreamableLinear, empty_linear, weight_view
from inference_svc.models.layer_streaming.weight_placement import Extent, WeightPlacement, placement_on
from inference_svc.models.layer_streaming.weight_source import set_parameter
from inference_svc.models.progress_bar import progress_bar

log = structlog.get_logger("model")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StreamedModel:
    """The layers of a streamed model, and the source of their weights."""

    source: LayerSource
    fused: list[FusedLayerWeights]  # empty if the model's own layers compute
    windows: tuple[int | None, ...]  # windows of the layers, which the model itself may no longer contain
    residency: ResidencyPlan
    file: LayerFile
    read_ahead: ReadAhead | DeviceSlots | None  # None if all layers are resident
    products: torch.nn.ModuleList  # linear layers of the first layer, and the head

    @property
    def stats(self) -> ReadAheadStats:
        return ReadAheadStats() if self.read_ahead is None else self.read_ahead.stats

    def close(self) -> None:
        """Stop the read-ahead; later forwards fail."""
        if self.read_ahead is not None:
            self.read_ahead.close()


def load_streamed(
    recipe: LayerFileRecipe,
    identity: bytes,
    asked: StreamingOptions,
    models: ModelLibrary | None = None,
    device: torch.device = _CPU,
) -> tuple[Any, StreamedModel]:
    """Load a recipe's model, whose weights have the fingerprint ``identity``.

    Layers compute on ``device``, which must match the recipe. Builds the layer file if it is missing or corrupt, and if
    the model will fit. Raises ModelUnsupported, ConfigurationError.
    """
    models, asked = models or ModelLibrary(), with_copy(recipe, asked)
    check_streamable(recipe)
    place, target = placement_on(device), _place(recipe, identity, models.root / "converted")
    for last in (False, True):
        with models.building(target) as folder:
            if folder is not None:
                size = estimate_sizes(recipe)
                plan_residency(size.sizes, place.free_bytes(asked), asked)  # refuses before the file is written
                build_layer_file(folder, recipe, size.kept)
        found = _inode(target)
        try:
            file = LayerFile(target)
            check_layouts(file.index)
            return _ModelAssembly(recipe, file, asked, place).model()
        except LayerFileDamaged as error:
            if last:
                raise ModelUnsupported(f"{target} was written anew, and is damaged again: {error}") from error
            log.warning("the file of layers is damaged, it is written again", reason=str(error))
            models.discard(target, found)
    raise AssertionError("unreachable")


def sizes_of(file: LayerFile, device_dtype: torch.dtype | None = None) -> WeightSizes:
    """Memory of a file's weights.

    ``device_dtype`` is the dtype in which a device computes; None on a CPU. On a device, an embedding that is not tied
    to the head takes memory, too, and a weight in codes is widened for each product. On a CPU, the numerics probe at
    the start needs a plain and a packed weight of each shape.
    """
    layers = []
    for layer in file.index.layers:
        parts = [0, 0]
        for name, stored in layer.items():
            parts[is_feed_forward(name)] += padded(stored.form.size_bytes)
        layers.append((parts[0], parts[1]))
    head, embedding = file.index.head, file.index.embedding
    always = padded(head.form.size_bytes) + sum(v.nbytes for v in file.vectors.values())
    if device_dtype is None:
        packed = [s.form.size_bytes for layer in file.index.layers for s in layer.values() if s.form.kind == "packed"]
        return WeightSizes(layers, always, 2 * max(packed, default=0))
    if embedding != head:
        always += padded(embedding.form.size_bytes)
    coded = [s.form.outputs * s.form.inputs for s in file.index.stored if s.form.kind == "quantized"]
    return WeightSizes(layers, always, max(coded, default=0) * device_dtype.itemsize)


def _inode(folder: Path) -> int:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:  # another process found the folder corrupt and removed it
        return 0


def check_layouts(index: LayerIndex) -> None:
    """Raise LayerFileDamaged if oneDNN's layout on this machine differs from the file's layout."""
    forms = {s.form for s in index.stored if s.form.kind == "packed"}
    for form in forms:
        weight = torch.empty(form.outputs, form.inputs, dtype=torch.bfloat16)  # only the layout matters
        here = onednn_weights.descriptor(torch.ops.mkldnn._reorder_linear_weight(weight, None))
        if here.hex() != form.layout:
            raise LayerFileDamaged("it was written for another CPU or version of oneDNN")


def check_streamable(recipe: LayerFileRecipe) -> None:
    """Raise ModelUnsupported for a model whose layers cannot be streamed."""
    model = recipe.meta_model()
    large = next((name for name, p in model.model.layers.named_parameters() if p.dim() > 2), None)
    if large is not None:
        raise ModelUnsupported(
            f"{recipe.name} has layers.{large}, of several experts at once, which is not streamed; use --stream off, "
            "or a model without experts"
        )


def with_copy(recipe: LayerFileRecipe, asked: StreamingOptions) -> StreamingOptions:
    """Options with the bytes of a requested draft copy added to ``beside_bytes``."""
    if not asked.copy_bits:
        return asked
    size = estimate_sizes(replace(recipe, bits=asked.copy_bits)).sizes.all
    return replace(asked, beside_bytes=asked.beside_bytes + size, copy_bits=0)


def streaming_needed(recipe: LayerFileRecipe, width: int, asked: StreamingOptions, free: int) -> bool:
    """True if the model does not fit into ``free`` bytes at ``width`` bits, and streaming helps.

    False also if the weights fit without the pool, but streaming does not help: the system commits memory for the pool
    only on use. Raises ConfigurationError if the weights do not fit either, before any file is written.
    """
    found, asked = estimate_sizes(recipe), with_copy(recipe, asked)
    # Weights that are quantized at loading are first all in memory unquantized.
    most = max(found.kept, found.dense if recipe.bits == width else 0)
    if most + reserved_bytes(asked) <= free:
        return False
    try:
        plan_residency(found.sizes, free, asked)
    except ConfigurationError:
        if most + reserved_bytes(replace(asked, pool_bytes=0)) > free:
            raise
        log.warning(
            "memory is short: weights fit, but not with a full pool; a smaller pool_bytes is safer",
            free=format_size(free),
            weights=format_size(found.kept),
            pool=format_size(asked.pool_bytes),
        )
        return False
    return True


def _place(recipe: LayerFileRecipe, identity: bytes, parent: Path) -> Path:
    """Path of a model's layer file; its name contains everything that determines its bytes."""
    packed = recipe.dtype == torch.bfloat16 and recipe.bits == 16 and not recipe.on_device
    decides = {
        "weights": identity.hex(),
        "dtype": str(recipe.dtype),
        "bits": recipe.bits,
        # The CPU determines the kernels' layouts; the CPU and torch determine oneDNN's layout.
        "kernels": cpu_library.usable_variants(),
        **({"device": True} if recipe.on_device else {}),
        **({"own_head": True} if recipe.own_head else {}),
        "layout": [torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine()] if packed else [],
        "version": VERSION,
    }
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.name).lstrip(".-")[:40]
    found = next(iter(sorted(parent.glob(f"[!.]*-{key}-layers"))), None)
    return found or parent / f"{name}-{key}-layers"


@dataclass
class _Piece:
    """Part of a layer that one read loads."""

    at: int
    size: int
    products: list[tuple[StreamableLinear, StoredWeight]] = field(default_factory=list)


class _ModelAssembly:
    """Assembly of one model from one file."""

    def __init__(
        self, recipe: LayerFileRecipe, file: LayerFile, asked: StreamingOptions, place: WeightPlacement
    ) -> None:
        self._recipe, self._file, self._asked, self._place = recipe, file, asked, place
        sizes = sizes_of(file, recipe.dtype if recipe.on_device else None)
        self.residency = plan_residency(sizes, place.free_bytes(asked), asked)

    def model(self) -> tuple[Any, StreamedModel]:
        """Assemble the model. Raises LayerFileDamaged."""
        recipe, index = self._recipe, self._file.index
        model = recipe.meta_model()
        inner = model.model
        windows = windows_of(model)
        products = [self._shells(i, layer) for i, layer in enumerate(index.layers)]
        made: list[FusedLayerWeights] = []
        for i, layer in enumerate(inner.layers):
            vectors = self._vectors(f"layers.{i}.")
            if index.fused:
                made.append(fused_layer_weights.make_layer(layer, products[i], vectors))
            else:
                _set_parameters(layer, products[i], vectors)
        if index.fused:
            inner.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in made)
        _set_parameters(inner.norm, {}, self._vectors("norm."))
        head = empty_linear(index.head.form, self._bias("lm_head"), recipe.on_device)
        model.lm_head = head
        resident: list[tuple[StreamableLinear, StoredWeight]] = [(head, index.head)]
        pieces: dict[int, _Piece] = {}
        for i, part in enumerate(self.residency.parts):
            streamed = [name for name in products[i] if part.streams(is_feed_forward(name))]
            resident += [(products[i][n], index.layers[i][n]) for n in products[i] if n not in streamed]
            if streamed:
                parts = [(products[i][n], index.layers[i][n]) for n in streamed]
                pieces[i] = _Piece(parts[0][1].at, parts[-1][1].end - parts[0][1].at, parts)
        self._read_all(resident)
        inner.embed_tokens = self._embedding(inner.embed_tokens, head)
        lacking = [name for name, p in [*model.named_parameters(), *model.named_buffers()] if p.is_meta]
        if lacking:
            raise ModelUnsupported(f"{recipe.name} has {lacking[0]}, which is not streamed; use --stream off")
        staging, source = self._staging(pieces)
        self._say(staging)
        first = torch.nn.ModuleList([*products[0].values(), head])
        return model, StreamedModel(source, made, windows, self.residency, self._file, staging, first)

    def _shells(self, i: int, layer: Mapping[str, StoredWeight]) -> dict[str, StreamableLinear]:
        return {
            name: empty_linear(stored.form, self._bias(f"layers.{i}.{name}"), self._recipe.on_device)
            for name, stored in layer.items()
        }

    def _bias(self, linear: str) -> Tensor | None:
        bias = self._file.vectors.get(f"{linear}.bias")
        return None if bias is None else self._place.place(bias)

    def _vectors(self, start: str) -> dict[str, Tensor]:
        found = {n.removeprefix(start): v for n, v in self._file.vectors.items() if n.startswith(start)}
        return {name: self._place.place(vector) for name, vector in found.items()}

    def _read_all(self, resident: list[tuple[StreamableLinear, StoredWeight]]) -> None:
        """Read resident weights, and verify the others."""
        stays = {stored.at: product for product, stored in resident}
        scratch = large_pages.allocate(CHECK_BYTES)
        everything = self._file.index.stored
        with progress_bar("reading and checking layers") as progress:
            for stored in everything:
                if stored.at in stays:
                    memory = large_pages.allocate(padded(stored.form.size_bytes))
                    self._file.load(stored, memory)
                    memory = self._place.place(memory)
                    stays[stored.at].set_weight(weight_view(stored.form, memory))  # type: ignore[arg-type]
                    stays[stored.at].memory = memory  # keeps it alive: a packed weight holds no reference to its memory
                else:
                    self._file.check(stored, scratch)
                progress(stored.end, everything[-1].end)

    def _embedding(self, own: Any, head: StreamableLinear) -> torch.nn.Module:
        index, scale = self._file.index, getattr(own, "scalar_embed_scale", None)
        if index.head == index.embedding and scale is None:
            shared = torch.nn.Embedding(own.num_embeddings, own.embedding_dim, device="meta")
            shared.weight = torch.nn.Parameter(head.weight, requires_grad=False)  # type: ignore[arg-type]
            return shared
        if self._recipe.on_device:
            return self._device_embedding(own, head)
        return StoredEmbedding(self._file, index.embedding, self._recipe.dtype, scale)

    def _device_embedding(self, own: Any, head: StreamableLinear) -> torch.nn.Module:
        """Return the model's own module, over the head's weight or over an embedding that is loaded to the device."""
        stored = self._file.index.embedding
        if stored == self._file.index.head:
            rows: Any = head.weight
        else:
            memory = large_pages.allocate(padded(stored.form.size_bytes))
            self._file.load(stored, memory)
            rows = weight_view(stored.form, memory)
        own.weight = torch.nn.Parameter(self._place.place(rows.to(self._recipe.dtype)), requires_grad=False)
        module: torch.nn.Module = own.to(self._place.device)
        return module

    def _staging(self, pieces: dict[int, _Piece]) -> tuple[ReadAhead | DeviceSlots | None, LayerSource]:
        if not pieces:
            return None, RESIDENT
        slots, order = self._place.slots(self.residency), list(pieces.values())
        targets: dict[int, Targets] = {
            number: [
                (product, [weight_view(stored.form, slot[stored.at - piece.at :]) for slot in slots])
                for product, stored in piece.products
            ]
            for number, piece in enumerate(order)
        }
        for target in targets.values():
            for product, _ in target:
                product.memory = slots  # type: ignore[assignment]  # a packed weight holds no reference to its memory
        extents = [Extent(piece.at, piece.size) for piece in order]
        staging = self._place.read_ahead(self._file, extents, slots, self._asked)
        return staging, StreamedLayers(staging, {layer: n for n, layer in enumerate(pieces)}, targets)

    def _say(self, staging: ReadAhead | DeviceSlots | None) -> None:
        residency = self.residency
        log.info(
            "layers are streamed" if staging else "layers are resident",
            mode=residency.mode,
            resident=format_size(residency.resident_bytes),
            read_by_each_forward=format_size(residency.streamed_bytes),
            slots=residency.slots,
            past_the_page_cache=self._file.direct,
        )


def _set_parameters(
    module: torch.nn.Module, products: Mapping[str, StreamableLinear], vectors: Mapping[str, Tensor]
) -> None:
    """Set the linear layers and other parameters of a module on the meta device."""
    for name, product in products.items():
        module.set_submodule(name, product)
    for name, _ in list(module.named_parameters()):
        if name in vectors:
            set_parameter(module, name, vectors[name])
