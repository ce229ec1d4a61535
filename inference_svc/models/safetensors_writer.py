"""Writes safetensors files piece by piece.

Format: https://github.com/huggingface/safetensors#format. The header is written first, so memory holds only one piece
of a tensor at a time.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Context that writes known tensors in order, each in any number of pieces."""

    def __init__(self, path: Path, tensors: Sequence[TensorSpec]) -> None:
        self._coming, self._written = list(reversed(tensors)), 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for spec in tensors:
            end = at + spec.size_bytes
            header[spec.name] = {
                "dtype": _DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, piece: Tensor) -> None:
        """Write the next piece of a tensor. Raises ValueError for a tensor that is not the next."""
        spec = self._coming[-1] if self._coming else TensorSpec("(nothing)", piece.dtype, (0,))
        size, left = piece.numel() * piece.element_size(), spec.size_bytes - self._written
        if (name, piece.dtype) != (spec.name, spec.dtype) or size > left:
            raise ValueError(f"{size} bytes of {name} ({piece.dtype}) come where {left} of {spec} are expected")
        self._file.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._written += size
        if size == left:
            self._coming.pop()
            self._written = 0

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._coming:
            raise ValueError(f"{len(self._coming)} tensors were not written, the first is {self._coming[-1].name}")
