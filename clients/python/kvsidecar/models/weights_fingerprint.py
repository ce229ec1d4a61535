"""Fingerprint of a model's weights: by content, not by name."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.checkpoint_files import engine_files, tensor_files, weight_files
from kvsidecar.models.file_digests import digests_of

_IGNORED_SETTINGS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
log = logging.getLogger(__name__)


def of_directory(folder: Path, tell: Callable[[str], object] = log.info) -> bytes:
    """Return SHA-256 over config.json and every byte of the safetensors files, in the order of their names.

    The files are read once, and again after they change; ``tell`` gets a sentence when that takes long. Raises
    ModelUnsupported without safetensors files, and for damaged files.
    """
    tensor_files(folder)  # refuses damaged files
    return _digest(folder, weight_files(folder), b"", tell)


def of_engine_directory(folder: Path, tell: Callable[[str], object] = log.info) -> bytes:
    """Return a fingerprint of all files that decide which weights an engine loads.

    Of several files, it covers the names, too, because an engine may choose by them. With one file, it equals
    ``of_directory``. Raises ModelUnsupported without safetensors files; does not check them, since the engine has
    loaded those that it needs.
    """
    files = engine_files(folder)
    names = json.dumps([file.name for file in files]).encode() if len(files) > 1 else b""
    return _digest(folder, files, names, tell)


def of_random(shape: str, seed: int) -> bytes:
    """Return the fingerprint of random weights that are the same in every process."""
    return hashlib.sha256(f"random:{shape}:{seed}".encode()).digest()


def _digest(folder: Path, files: list[Path], names: bytes, tell: Callable[[str], object]) -> bytes:
    if not files:
        raise ModelUnsupported(f"{folder} holds no .safetensors file; save the model with safetensors")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {k: v for k, v in settings.items() if k not in _IGNORED_SETTINGS}
    digests = digests_of(files, tell)
    return hashlib.sha256(b"".join([json.dumps(kept, sort_keys=True).encode(), names, *digests])).digest()
