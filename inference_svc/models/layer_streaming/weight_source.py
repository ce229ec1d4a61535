"""Sources of a model's weights, module by module, so that memory holds one layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from kvkernels.cpu import f32_gemm
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.checkpoint_files import tensor_files
from torch import Tensor, nn

from inference_svc.models import awq_checkpoint, safetensors_reader


class WeightSource(Protocol):
    """Source of weights for modules on the meta device.

    Callers request weights in the order of their names.
    """

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Load the weights of a module whose names start with ``prefix``, such as ``model.norm.``.

        Raises ModelUnsupported if a weight is missing.
        """
        ...

    def rows(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        """Yield the weight ``name [rows, width]`` in pieces of multiples of 16 rows.

        Raises ModelUnsupported.
        """
        ...

    def kept(self, name: str, shape: torch.Size, all_rows: bool = False) -> str:
        """Smallest lossless storage format of the weight ``name [rows, width]``.

        One of ``f32_gemm.STORAGE_FORMATS``. Decided from a sample of rows, or with ``all_rows`` from all rows. Raises
        ModelUnsupported.
        """
        ...

    def form(self, linear: str) -> tuple[int, int] | None:
        """Bits and group size of a linear layer that stays quantized; None for any other layer."""
        ...


# Rows of a weight in memory at a time: a multiple of the number of rows that are quantized at once.
_ROWS, _ROWS_BYTES = 2048, 32 << 20
# Rows that are sampled to predict a weight's storage format.
_SAMPLED_ROWS = 8


def _pieces(shape: torch.Size, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    step = max(1, _ROWS_BYTES // (shape[1] * dtype.itemsize) // _ROWS) * _ROWS
    return ((first, min(first + step, shape[0])) for first in range(0, shape[0], step))


def set_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a parameter of a module by name."""
    parent, _, last = name.rpartition(".")
    module.get_submodule(parent)._parameters[last] = nn.Parameter(tensor, requires_grad=False)


class CheckpointWeights:
    """Weights of a folder of safetensors.

    Quantized weights stay packed if ``keep`` supports their layer.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, keep: awq_checkpoint.LinearFactory | None) -> None:
        self._folder, self._dtype, self._keep = folder, dtype, keep
        self._where = tensor_files(folder)

    def fill(self, module: nn.Module, prefix: str) -> None:
        for name in [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]:
            full = f"{prefix}{name}" if name else prefix.removesuffix(".")
            if awq_checkpoint.is_packed(self._where, full):
                self._fill_quantized(module, name, full)
        for name, parameter in list(module.named_parameters()):
            if parameter.is_meta:
                set_parameter(module, name, self._tensor(prefix + name, parameter.shape))

    def rows(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        self._check(name, shape)
        for first, end in _pieces(shape, self._dtype):
            yield safetensors_reader.rows_in(self._where, name, first, end).to(self._dtype)

    def kept(self, name: str, shape: torch.Size, all_rows: bool = False) -> str:
        if awq_checkpoint.is_packed(self._where, name.removesuffix(".weight")):
            return "float32"  # the layer file stores it dequantized
        self._check(name, shape)
        if safetensors_reader.dtype_in(self._where, name) in (torch.bfloat16, torch.float16):
            return str(safetensors_reader.dtype_in(self._where, name)).removeprefix("torch.")
        if all_rows:
            return f32_gemm.storage_of(lambda: self.rows(name, shape))
        some = [
            safetensors_reader.rows_in(self._where, name, i, i + 1)
            for i in range(0, shape[0], -(-shape[0] // _SAMPLED_ROWS))
        ]
        # For most weights the first row already shows that codes cannot store them.
        return f32_gemm.storage_of(lambda: [part.to(self._dtype) for part in (some[0], torch.cat(some))])

    def form(self, linear: str) -> tuple[int, int] | None:
        if self._keep is None or not awq_checkpoint.is_packed(self._where, linear):
            return None
        return awq_checkpoint.form_in(self._where, linear)

    def _tensor(self, name: str, shape: torch.Size) -> Tensor:
        self._check(name, shape)
        return safetensors_reader.tensor_in(self._where, name).to(self._dtype)

    def _check(self, name: str, shape: torch.Size) -> None:
        if name not in self._where:
            raise ModelUnsupported(f"the files in {self._folder} have no {name}, by which streaming would find it")
        found = safetensors_reader.shape_in(self._where, name)
        if found != list(shape):
            raise ModelUnsupported(f"{name} is {found} in {self._folder}, and {list(shape)} in its model")

    def _fill_quantized(self, module: nn.Module, name: str, full: str) -> None:
        parts = awq_checkpoint.parts_in(self._where, full)
        layer = self._keep and self._keep(parts, awq_checkpoint.bias_in(self._where, full))
        if layer is None:
            set_parameter(
                module,
                f"{name}.weight".lstrip("."),
                awq_checkpoint.dequantize(parts).to(self._dtype),
            )
        else:
            module.set_submodule(name, layer)


class RandomWeights:
    """Random weights, generated from a seed in the order of their names."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def fill(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in sorted(module.named_parameters()):
            tensor = torch.empty(parameter.shape, dtype=self._dtype)
            fill_random(prefix + name, tensor, self._generator)
            set_parameter(module, name, tensor)

    def rows(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        # torch generates 16 numbers at a time, so pieces of rows get the same numbers as the whole weight.
        for first, end in _pieces(shape, self._dtype):
            tensor = torch.empty(end - first, shape[1], dtype=self._dtype)
            fill_random(name, tensor, self._generator)
            yield tensor

    def kept(self, name: str, shape: torch.Size, all_rows: bool = False) -> str:
        return "bfloat16"

    def form(self, linear: str) -> tuple[int, int] | None:
        return None


def fill_random(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a parameter of a random model with 16-bit numbers, as in real checkpoints."""
    if tensor.dim() == 1:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        tensor.copy_(torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator))


def fill_model(model: torch.nn.Module, seed: int) -> None:
    """Fill all parameters of a random model, with the same weights on every device."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        on_host = torch.empty_like(parameter, device="cpu", requires_grad=False)
        fill_random(name, on_host, generator)
        parameter.data.copy_(on_host)
