"""Writes embedding and head in pieces of rows, because both may exceed the available memory."""

from __future__ import annotations

from typing import Any

import torch
from kvkernels.cpu import f32_gemm, quantized_gemm
from torch import Tensor, nn

from inference_svc.models.layer_streaming.layer_file import LayerWriter, StoredWeight, WeightRegion
from inference_svc.models.layer_streaming.weight_form import WeightForm, bytes_of, dense_form, form_of
from inference_svc.models.layer_streaming.weight_source import WeightSource
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.quantized_linear import quantization_of

EMBEDDING, HEAD = "model.embed_tokens.", "lm_head."


class VocabularyWriter:
    """Writer of embedding and head of a model on the meta device.

    Linear weights have ``bits`` bits. ``packs`` and ``narrows`` are as in ``LayerFileRecipe``. The head is quantized,
    packed or dense like other layers. A plain head that is tied to the embedding shares the embedding's bytes.
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        bits: int,
        packs: bool,
        narrows: bool,
        materials: WeightSource,
        out: LayerWriter,
    ) -> None:
        self._dtype, self._materials, self._out = dtype, materials, out
        self._stored = materials.form(HEAD.removesuffix(".")) is not None
        self._embedding, self._head = model.model.embed_tokens.weight.shape, model.lm_head
        kept = quantization_of(HEAD.removesuffix("."), self._head.in_features, self._head.out_features, bits)
        self._kept = kept
        self._packs, self._dense, self._narrow = kept is None and packs, kept is None and narrows, narrows

    def embedding(self, tied: bool) -> tuple[StoredWeight, StoredWeight | None]:
        """Write the embedding, and the head if they are ``tied``."""
        name = f"{EMBEDDING}weight"
        kept = self._kept_as(name, self._embedding)
        plain = self._plain_region(kept)
        made = tied and not self._stored and (self._kept or self._dense)
        head = self._head_region(kept) if made else None
        for rows in self._materials.rows(name, self._embedding):
            plain.add(_bytes(rows.to(f32_gemm.value_dtype(kept))))
            if head is not None:
                head.add(self._made(rows, head.form))
        embedding = plain.done()
        if not tied:
            return embedding, None
        if self._stored:
            return embedding, self._stored_head()
        self._bias()
        if head is not None:
            return embedding, head.done()
        if not self._packs:
            return embedding, embedding
        return embedding, self._packed(self._out.read_back(embedding).view(self._dtype).view(self._embedding))

    def head(self) -> StoredWeight:
        """Write an untied head."""
        if self._stored:
            return self._stored_head()
        self._bias()
        name = f"{HEAD}weight"
        rows = self._materials.rows(name, self._head.weight.shape)
        if self._packs:
            return self._packed(torch.cat(list(rows)))
        kept = "" if self._kept is not None else self._kept_as(name, self._head.weight.shape)
        region = self._head_region(kept)
        for some in rows:
            region.add(self._made(some, region.form))
        return region.done()

    def _stored_head(self) -> StoredWeight:
        """Write a head that is quantized in the checkpoint."""
        holder = nn.ModuleDict({HEAD.removesuffix("."): self._head})
        self._materials.fill(holder, "")
        (head,) = holder.values()
        if isinstance(head.bias, Tensor):
            self._out.vectors[f"{HEAD}bias"] = head.bias.detach().clone()
        return self._out.put(bytes_of(head), form_of(head))

    def _bias(self) -> None:
        if self._head.bias is not None:
            holder = nn.Module()
            holder.register_parameter("bias", self._head.bias)
            self._materials.fill(holder, HEAD)
            self._out.vectors[f"{HEAD}bias"] = holder.get_parameter("bias").detach().clone()

    def _kept_as(self, name: str, shape: torch.Size) -> str:
        """Storage format of a weight, chosen by the values of all its rows.

        The possible formats are ``kvkernels.cpu.f32_gemm.STORAGE_FORMATS``.
        """
        if not self._narrow:
            return str(self._dtype).removeprefix("torch.")
        return self._materials.kept(name, shape, all_rows=True)

    def _plain_region(self, kept: str) -> WeightRegion:
        (outputs, inputs), dtype = self._embedding, f32_gemm.value_dtype(kept)
        size = outputs * inputs * dtype.itemsize
        return self._out.region(WeightForm("plain", outputs, inputs, size, str(dtype).removeprefix("torch.")))

    def _head_region(self, kept: str) -> WeightRegion:
        outputs, inputs = self._embedding
        if self._kept is not None:
            bits, group = self._kept
            size = quantized_gemm.size_bytes(inputs, outputs, bits, group)
            return self._out.region(WeightForm("quantized", outputs, inputs, size, bits=bits, group=group))
        if self._dense:
            return self._out.region(dense_form(outputs, inputs, kept))
        return self._plain_region(kept)

    def _made(self, rows: Tensor, form: WeightForm) -> Tensor:
        """Pack some rows of the head."""
        if form.kind == "quantized":
            return quantized_gemm.quantize(rows, form.bits, form.group).data.view(-1)
        if form.kind == "dense":
            return _bytes(f32_gemm.pack(rows, form.dtype).data)
        return _bytes(rows)

    def _packed(self, weight: Tensor) -> StoredWeight:
        packed = PackedLinear(weight, None)
        return self._out.put(bytes_of(packed), form_of(packed))


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)
