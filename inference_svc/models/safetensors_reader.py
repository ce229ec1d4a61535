"""Reads single tensors of the safetensors files in a model's folder."""

from __future__ import annotations

from pathlib import Path

import torch
from kvsidecar.errors import ModelUnsupported
from safetensors import safe_open
from torch import Tensor


def tensor_in(where: dict[str, Path], name: str) -> Tensor:
    """Load one tensor. Raises ModelUnsupported if it is missing."""
    if name not in where:
        raise ModelUnsupported(f"the model's files have no {name}, which the model needs")
    with safe_open(where[name], "pt") as data:
        return data.get_tensor(name)  # type: ignore[no-any-return]


def shape_in(where: dict[str, Path], name: str) -> list[int]:
    """Shape of an existing tensor."""
    with safe_open(where[name], "pt") as data:
        return list(data.get_slice(name).get_shape())


def dtype_in(where: dict[str, Path], name: str) -> torch.dtype:
    """Dtype of an existing tensor."""
    with safe_open(where[name], "pt") as data:
        return data.get_slice(name)[:1].dtype  # type: ignore[no-any-return]


def rows_in(where: dict[str, Path], name: str, first: int, end: int) -> Tensor:
    """Load some rows of an existing tensor."""
    with safe_open(where[name], "pt") as data:
        return data.get_slice(name)[first:end]  # type: ignore[no-any-return]
