"""Chooses a folder's safetensors files like transformers or for engines, and maps tensors to files. Needs no torch.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from kvsidecar.errors import ModelUnsupported

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN = "download the model again"


def weight_files(folder: Path) -> list[Path]:
    """List the files with a model's weights.

    These are model.safetensors, or else the files in the index, or else all safetensors files. Raises ModelUnsupported
    for a damaged index, and for one that names a missing file.
    """
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        files = sorted({folder / file for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"{index} is damaged: it has no weight_map of tensors to files; {_AGAIN}") from error
    for file in files:
        if not file.is_file():
            raise ModelUnsupported(f"{index} names {file.name}, which is missing; {_AGAIN}")
    return files


def engine_files(folder: Path) -> list[Path]:
    """List all files that decide which weights an engine loads.

    Engines choose among several safetensors files by their own rules, some by an index. So these are all safetensors
    files and, if they are several, all indexes.
    """
    files = _matches(folder, "*.safetensors")
    return files + _matches(folder, "*.safetensors.index.json") if len(files) > 1 else files


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map each tensor of a folder's weights to its file.

    Raises ModelUnsupported for a damaged or unreadable file, and for a name that two files have.
    """
    where: dict[str, Path] = {}
    for file in weight_files(folder):
        for name in _dtypes(file):
            if name in where:
                raise ModelUnsupported(
                    f"{folder} has the tensor {name} in {where[name].name} and in {file.name}; keep one model's files"
                )
            where[name] = file
    return where


def tensor_dtypes(folder: Path) -> dict[str, str]:
    """Map each tensor of a folder's weights to its dtype in the words of safetensors, such as ``BF16``.

    Raises ModelUnsupported for a damaged or unreadable file.
    """
    return {name: dtype for file in weight_files(folder) for name, dtype in _dtypes(file).items()}


def _matches(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.glob(pattern) if file.is_file())


def _dtypes(file: Path) -> dict[str, str]:
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            head = data.read(8)
            (length,) = struct.unpack("<Q", head) if len(head) == 8 else (size,)
            if 8 + length > size:
                raise ModelUnsupported(f"{file} is damaged: it is truncated, or no safetensors file; {_AGAIN}")
            tensors = json.loads(data.read(length))
        tensors.pop("__metadata__", None)
        found = {name: str(tensor.get("dtype")) for name, tensor in tensors.items()}
        needed = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except OSError as error:
        raise ModelUnsupported(f"cannot read {file}: {str(error.strerror).lower()}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"{file} is damaged: its header is unreadable; {_AGAIN}") from error
    if size - 8 - length != needed:
        raise ModelUnsupported(
            f"{file} is damaged: it has {size - 8 - length} bytes of tensors instead of {needed}; {_AGAIN}"
        )
    return found
