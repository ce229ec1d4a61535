"""Weights of a model, module by module, so that no more than one layer of it need ever be in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from kvkernels.cpu import f32_gemm
from kvkernels.cuda.awq_gemm import reference_weight
from kvsidecar.errors import ModelUnsupported
from torch import Tensor, nn

from inference_svc.models import awq_checkpoint


class WeightSource(Protocol):
    """Gives modules that have no weights theirs. They are asked for in the order of their names."""

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Gives a module of the meta device, which the model names ``prefix`` (``model.norm.``, say), its weights.
        Raises ModelUnsupported when they lack one."""
        ...

    def rows(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        """The weight ``name [rows, width]``, some rows at a time, in multiples of 16. Raises ModelUnsupported."""
        ...

    def kept(self, name: str, shape: torch.Size, all_rows: bool = False) -> str:
        """How the weight ``name [rows, width]`` is kept in the fewest bytes (``f32_gemm.KEPT``), by some of its rows
        or by all. Raises ModelUnsupported."""
        ...

    def group(self, linear: str) -> int:
        """Inputs that share a scale, of a linear layer that stays at 4 bits; 0 for others."""
        ...


# What of a weight is in memory at a time, where it comes by rows: those that are quantized at a time, or more.
_ROWS, _ROWS_BYTES = 2048, 32 << 20
# Rows by which it is told how a weight will be kept.
_SAMPLED_ROWS = 8


def _pieces(shape: torch.Size, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    step = max(1, _ROWS_BYTES // (shape[1] * dtype.itemsize) // _ROWS) * _ROWS
    return ((first, min(first + step, shape[0])) for first in range(0, shape[0], step))


def set_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Makes a tensor the parameter of this name in a module."""
    parent, _, last = name.rpartition(".")
    module.get_submodule(parent)._parameters[last] = nn.Parameter(tensor, requires_grad=False)


class CheckpointWeights:
    """A folder of safetensors, in one file or many, with AutoAWQ's 4-bit weights where it has some: those that ``keep``
    takes stay as they are."""

    def __init__(self, folder: Path, dtype: torch.dtype, keep: awq_checkpoint.LinearFactory | None) -> None:
        self._folder, self._dtype, self._keep = folder, dtype, keep
        self._where = awq_checkpoint.tensor_files(folder)

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
            yield awq_checkpoint.rows_in(self._where, name, first, end).to(self._dtype)

    def kept(self, name: str, shape: torch.Size, all_rows: bool = False) -> str:
        if awq_checkpoint.is_packed(self._where, name.removesuffix(".weight")):
            return "float32"  # it is written out
        self._check(name, shape)
        if awq_checkpoint.dtype_in(self._where, name) in (torch.bfloat16, torch.float16):
            return str(awq_checkpoint.dtype_in(self._where, name)).removeprefix("torch.")
        if all_rows:
            return f32_gemm.kept_of(lambda: self.rows(name, shape))
        some = [
            awq_checkpoint.rows_in(self._where, name, i, i + 1)
            for i in range(0, shape[0], -(-shape[0] // _SAMPLED_ROWS))
        ]
        # Of most weights the first row says that they have no codes.
        return f32_gemm.kept_of(lambda: [part.to(self._dtype) for part in (some[0], torch.cat(some))])

    def group(self, linear: str) -> int:
        if self._keep is None or not awq_checkpoint.is_packed(self._where, linear):
            return 0
        return awq_checkpoint.group_in(self._where, linear)

    def _tensor(self, name: str, shape: torch.Size) -> Tensor:
        self._check(name, shape)
        return awq_checkpoint.tensor_in(self._where, name).to(self._dtype)

    def _check(self, name: str, shape: torch.Size) -> None:
        if name not in self._where:
            raise ModelUnsupported(f"the files in {self._folder} have no {name}, by which streaming would find it")
        found = awq_checkpoint.shape_in(self._where, name)
        if found != list(shape):
            raise ModelUnsupported(f"{name} is {found} in {self._folder}, and {list(shape)} in its model")

    def _fill_quantized(self, module: nn.Module, name: str, full: str) -> None:
        parts = awq_checkpoint.parts_in(self._where, full)
        layer = self._keep and self._keep(parts, awq_checkpoint.bias_in(self._where, full))
        if layer is None:
            set_parameter(
                module,
                f"{name}.weight".lstrip("."),
                reference_weight(*awq_checkpoint.with_float32_scales(parts)).to(self._dtype),
            )
        else:
            module.set_submodule(name, layer)


class RandomWeights:
    """Random weights, those that a seed gives when all are drawn in the order of their names."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def fill(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in sorted(module.named_parameters()):
            tensor = torch.empty(parameter.shape, dtype=self._dtype)
            fill_random(prefix + name, tensor, self._generator)
            set_parameter(module, name, tensor)

    def rows(self, name: str, shape: torch.Size) -> Iterator[Tensor]:
        # Numbers are drawn 16 at a time: those of some rows are those that they have when all are drawn at once.
        for first, end in _pieces(shape, self._dtype):
            tensor = torch.empty(end - first, shape[1], dtype=self._dtype)
            fill_random(name, tensor, self._generator)
            yield tensor

    def kept(self, name: str, shape: torch.Size, all_rows: bool = False) -> str:
        return "bfloat16"

    def group(self, linear: str) -> int:
        return 0


def fill_random(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fills a parameter of a random model, with numbers of 16 bits, as models come."""
    if tensor.dim() == 1:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        tensor.copy_(torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator))
