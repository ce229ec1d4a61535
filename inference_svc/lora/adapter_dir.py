"""Adapter folder: required files, configuration and tensor shapes.

Imports no torch, so that commands can check adapters without torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsidecar.errors import ConfigurationError

from inference_svc.lora.peft_config import CONFIG, PeftConfig, read_peft_config

WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
MAX_HEADER_BYTES = 100 << 20
# Maximum bytes of one stored element in memory: float32, tripled because a fused layer joins up to three linears.
_ELEMENT_BYTES = 4 * 3
# Limits the time that the size of a corrupt tensor takes to compute; a linear layer's matrix has two dimensions.
_MAX_DIMENSIONS = 8
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.(?P<which>lora_A|lora_B)\.weight")


@dataclass(frozen=True)
class AdapterDir:
    """Checked adapter folder. ``shapes`` maps tensor names in the file to their shapes."""

    name: str
    path: Path
    peft: PeftConfig
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def max_bytes(self) -> int:
        """Upper bound of the memory of the adapter's weights."""
        return sum(math.prod(shape) for shape in self.shapes.values()) * _ELEMENT_BYTES

    def pairs(self) -> dict[str, tuple[str, str]]:
        """Maps each layer's path in the model to the tensor names of its two matrices.

        Raises ConfigurationError for any other tensor in the file.
        """
        found: dict[str, dict[str, str]] = {}
        for key in self.shapes:
            match = _KEY.fullmatch(key)
            if match is None:
                raise self.refusal(f"has {key!r}, which is no matrix of a linear layer; only these are supported")
            found.setdefault(match["path"], {})[match["which"]] = key
        for path, keys in found.items():
            if len(keys) < 2:
                raise self.refusal(f"has only {next(iter(keys))} of {path}; both matrices are needed")
        return {path: (keys["lora_A"], keys["lora_B"]) for path, keys in found.items()}

    def refusal(self, why: str) -> ConfigurationError:
        """Build the error for unusable weights, in one sentence."""
        return ConfigurationError(f"LoRA adapter {self.name}: {self.path / WEIGHTS} {why}")


def open_adapter_dir(name: str, path: Path) -> AdapterDir:
    """Read an adapter's configuration and tensor shapes, without weights. Raises ConfigurationError."""
    try:
        if not path.is_dir():
            raise ConfigurationError(f"there is no folder {path}")
        if not (path / CONFIG).is_file():
            raise ConfigurationError(f"{path} has no {CONFIG}; name a folder that PEFT's save_pretrained wrote")
        settings = read_peft_config(path / CONFIG)
        if not (path / WEIGHTS).is_file():
            if (path / _PICKLED).is_file():
                raise ConfigurationError(
                    f"{path} has its weights in {_PICKLED}, a pickle, which could run any code; save it as safetensors"
                )
            raise ConfigurationError(f"{path} has no {WEIGHTS}")
    except ConfigurationError as error:
        raise ConfigurationError(f"LoRA adapter {name}: {error}") from error
    folder = AdapterDir(name, path, settings, _shapes(name, path / WEIGHTS))
    if not folder.pairs():
        raise folder.refusal("has no weights")
    return folder


def _shapes(name: str, file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, from the header of a safetensors file."""
    try:
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes")
            header: dict[str, Any] = json.loads(data.read(length))
        return {key: _shape(key, one["shape"]) for key, one in header.items() if key != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"LoRA adapter {name}: {file} is no safetensors file: {error}") from error


def _shape(key: str, sizes: Any) -> tuple[int, ...]:
    """Check a tensor's shape. Raises ValueError."""
    if not (
        isinstance(sizes, list)
        and len(sizes) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 2**63 for size in sizes)
    ):
        raise ValueError(f"{key[:200]!r} has an impossible shape")
    return tuple(sizes)
