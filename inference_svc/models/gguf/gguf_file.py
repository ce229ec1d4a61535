"""Reads GGUF headers and packed tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The ``gguf`` package's own reader creates an object
for every token, which takes 24 s for a vocabulary of 262,144. This reader skips lists of strings and takes half a
second.
"""

from __future__ import annotations

import mmap
import reprlib
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.gguf_parts import part_paths
from numpy.typing import NDArray

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_INTEGERS = ("general.alignment", "split.count")  # metadata that this module computes with

# Types that the gguf package unpacks. Excluded are Q8_1 and Q8_K, which no file contains, and integer types, which hold
# no weights.
UNPACKED = frozenset(
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S "
    "IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4".split()
)


@dataclass(frozen=True)
class TensorInfo:
    """Location and type of a tensor. ``shape`` is in torch's order: the dimension with the longest stride is first."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # from the beginning of ``path``
    size_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata (without lists of strings) and its tensors.

    For a model in several files, ``path`` is the first file, and the metadata are those of the whole model.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's metadata, such as ``attention.head_count``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Like ``get``; raises ModelUnsupported if the value is missing."""
        found = self.get(key)
        if found is None:
            raise ModelUnsupported(f"{self.path} has no {self.architecture}.{key}, which its model cannot do without")
        return found

    @property
    def kinds(self) -> set[str]:
        """Names of the quantizations in the file."""
        return {t.kind.name for t in self.tensors.values()}

    @property
    def dtype(self) -> str:
        """The dtype of the weights: bfloat16 when they are quantized."""
        if self.kinds <= {"F32"}:
            return "float32"
        return "float16" if self.kinds <= {"F32", "F16"} else "bfloat16"

    @property
    def head_dim(self) -> int:
        """Channels of a head. Raises ModelUnsupported if the file does not tell."""
        found = self.get("attention.key_length")
        if self.architecture == "llama":
            found = found or self.get("rope.dimension_count")
        return int(found or self.need("embedding_length") // self.need("attention.head_count"))

    def packed(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """A tensor's bytes ``[rows, bytes of a row]``, memory-mapped: only the parts that are read use memory."""
        rows = prod(tensor.shape[:-1])
        mapped = np.memmap(tensor.path, np.uint8, "r", tensor.offset, (tensor.size_bytes,))
        return mapped.reshape(rows, -1)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file, or of all parts if ``path`` is one of several.

    Raises ModelUnsupported for a file that is not GGUF, is corrupt, lacks a part, or holds an unsupported quantization.
    """
    first, *others = part_paths(path)
    found = _read_part(first)
    parts = found.metadata.get("split.count") or 1
    if parts != 1 + len(others):
        raise ModelUnsupported(
            f"{first} is one of {parts} parts, which its name does not tell; name them as llama-gguf-split does, like "
            f"{first.stem}-00001-of-{parts:05}.gguf"
        )
    for number, other in enumerate(others, 1):
        part = _read_part(other)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, parts):
            raise ModelUnsupported(f"{other} is not part {number + 1} of the {parts} parts of {first.name}")
        if twice := found.tensors.keys() & part.tensors.keys():
            raise ModelUnsupported(f"{other} holds {min(twice)}, which another part of {first.name} holds, too")
        found.tensors.update(part.tensors)
    wanted = found.metadata.get("split.tensors.count", len(found.tensors))
    if wanted != len(found.tensors):
        raise ModelUnsupported(f"the parts of {first} hold {len(found.tensors)} tensors, and should hold {wanted}")
    refused = sorted(found.kinds - UNPACKED)
    if refused:
        raise ModelUnsupported(
            f"{first} holds weights quantized as {', '.join(refused)}; supported are {', '.join(sorted(UNPACKED))}"
        )
    return found


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _parse(path, _Cursor(mapped), len(mapped))
    except (struct.error, UnicodeDecodeError, IndexError, OverflowError, ValueError) as error:
        raise ModelUnsupported(f"{path} is not a GGUF file, or is damaged: {error}") from error
    except OSError as error:
        raise ModelUnsupported(f"cannot read {path}: {error.strerror}") from error


class _Cursor:
    """Cursor that reads little-endian values."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        """Read the next bytes. Raises ValueError past the end."""
        if count > len(self._data) - self.at:
            raise ValueError(f"it ends at byte {len(self._data)}, in the middle of its header")
        found = self._data[self.at : self.at + count]
        self.at += count
        return found

    def values(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def one(self, form: str) -> Any:
        return self.values(form)[0]

    def text(self) -> str:
        return self.take(self.one("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """Read a metadata value; a list of strings yields its length."""
        if kind in _SCALARS:
            return self.one(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"its metadata holds a value of the unknown type {kind}")
        inner, count = self.values("IQ")
        if inner in _SCALARS:
            form = _SCALARS[inner]
            return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}"))))
        if inner != _STRING:
            raise ValueError(f"its metadata holds a list of the unknown type {inner}")
        for _ in range(count):
            self.take(self.one("Q"))
        return count


def _parse(path: Path, cursor: _Cursor, size: int) -> GgufFile:
    if cursor.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version, tensor_count, value_count = cursor.values("IQQ")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}; readable are {', '.join(map(str, _VERSIONS))}")
    metadata = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.one("I"))
    for key in _INTEGERS:
        if not isinstance(metadata.get(key, 0), int):
            raise ValueError(f"its {key} is {reprlib.repr(metadata[key])}; allowed is an integer")
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment") or _ALIGNMENT
    begin = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in entries:
        found = TensorInfo(path, name, shape, kind, begin + offset, _size(name, shape, kind))
        if found.offset + found.size_bytes > size:
            raise ValueError(f"it ends at byte {size}, in the middle of {name}")
        tensors[name] = found
    return GgufFile(path, metadata, tensors)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name, dimensions = cursor.text(), cursor.one("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = cursor.values(f"{dimensions}Q")
    number, offset = cursor.values("IQ")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelUnsupported(
            f"{name} is quantized as number {number}, which is not known; supported are {', '.join(sorted(UNPACKED))}"
        ) from None
    return name, tuple(reversed(shape)), kind, offset


def _size(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"the rows of {name} have {shape[-1]} elements, which is not a multiple of {block}")
    return prod(shape) // block * block_bytes
