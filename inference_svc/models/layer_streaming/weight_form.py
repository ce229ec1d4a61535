"""Memory layouts of linear weights, so that their bytes can be written and read back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from kvkernels.cpu import f32_gemm
from kvkernels.cpu.quantized_gemm import OUTPUTS, QuantizedWeight
from torch import Tensor, nn

from inference_svc.models.layer_streaming import onednn_weights
from inference_svc.models.linear.dense_linear import DenseLinear
from inference_svc.models.linear.dequantized_linear import DequantizedLinear
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import PlainLinear
from inference_svc.models.linear.quantized_linear import QuantizedLinear

StreamableLinear = PackedLinear | QuantizedLinear | DequantizedLinear | DenseLinear | PlainLinear
# A weight with one of these layouts.
WeightView = Tensor | QuantizedWeight | f32_gemm.DenseWeight
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class WeightForm:
    """Shape and layout of one weight ``[outputs, inputs]``."""

    kind: str  # packed (oneDNN), quantized (kvkernels.cpu.quantized_gemm), dense (kvkernels.cpu.f32_gemm) or plain
    outputs: int
    inputs: int
    size_bytes: int
    dtype: str = ""  # dtype of a plain weight, or storage format of a dense weight
    bits: int = 16
    group: int = 0  # group size of a quantized weight
    layout: str = ""  # oneDNN's descriptor of a packed weight, hexadecimal

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}


def form_of(module: nn.Module) -> WeightForm:
    """Form of a layer's weight. Raises TypeError for an unsupported layer."""
    if isinstance(module, PackedLinear):
        layout = onednn_weights.descriptor(module.packed).hex()
        size = onednn_weights.packed_bytes(module.packed).numel()
        return WeightForm("packed", module.out_features, module.in_features, size, layout=layout)
    if isinstance(module, QuantizedLinear):
        w = module.quantized
        return WeightForm("quantized", w.outputs, w.inputs, w.data.nbytes, bits=w.bits, group=w.group)
    if isinstance(module, DenseLinear):
        return dense_form(module.out_features, module.in_features, module.dense.storage)
    if isinstance(module, PlainLinear):
        outputs, inputs = module.weight.shape
        return WeightForm(
            "plain", outputs, inputs, module.weight.nbytes, str(module.weight.dtype).removeprefix("torch.")
        )
    raise TypeError(f"{type(module).__name__} has no weight that could be streamed")


def dense_form(outputs: int, inputs: int, kept: str) -> WeightForm:
    """Form of a dense weight in the storage format ``kept``."""
    return WeightForm("dense", outputs, inputs, f32_gemm.size_bytes(inputs, outputs, kept), kept)


def bytes_of(module: nn.Module) -> Tensor:
    """Bytes of a layer's weight, uint8 ``[size_bytes]``; valid as long as the layer."""
    if isinstance(module, PackedLinear):
        return onednn_weights.packed_bytes(module.packed)
    if isinstance(module, QuantizedLinear):
        return module.quantized.data.view(-1)
    if isinstance(module, DenseLinear):
        return module.dense.data.view(-1).view(torch.uint8)
    assert isinstance(module, PlainLinear)
    return module.weight.contiguous().view(-1).view(torch.uint8)


def weight_view(form: WeightForm, memory: Tensor) -> WeightView:
    """View of a weight of this form over the start of ``memory``, which must outlive it."""
    memory = memory[: form.size_bytes]
    if form.kind == "packed":
        return onednn_weights.packed_at(memory, form.outputs, form.inputs, bytes.fromhex(form.layout))
    if form.kind == "quantized":
        return QuantizedWeight(memory.view(form.outputs // OUTPUTS, -1), form.inputs, form.group, form.bits)
    if form.kind == "dense":
        return f32_gemm.of_bytes(memory, form.inputs, form.outputs, form.dtype)
    return memory.view(_DTYPES[form.dtype]).view(form.outputs, form.inputs)


def empty_linear(form: WeightForm, bias: Tensor | None, on_device: bool = False) -> StreamableLinear:
    """Create a layer of this form without a weight, for the CPU or another device."""
    if on_device and form.kind == "quantized":
        return DequantizedLinear.empty(form.outputs, form.inputs, bias)
    kinds = {"packed": PackedLinear, "quantized": QuantizedLinear, "dense": DenseLinear, "plain": PlainLinear}
    kind: Any = kinds[form.kind]
    made: StreamableLinear = kind.empty(form.outputs, form.inputs, bias)
    return made
