"""Fingerprint of a model's weights: by content, not by name."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.checkpoint_files import tensor_files, weight_files
from kvsidecar.models.file_digests import digests_of

_IGNORED_SETTINGS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
log = logging.getLogger(__name__)


def of_directory(folder: Path, tell: Callable[[str], object] = log.info) -> bytes:
    """Return SHA-256 over config.json and every byte of the safetensors files, in the order of their names.

    The files are read once, and again after they change; ``tell`` gets a sentence when that takes long. Raises
    ModelUnsupported without safetensors files, and for damaged files.
    """
    files = weight_files(folder)
    if not files:
        raise ModelUnsupported(f"{folder} holds no .safetensors file; save the model with safetensors")
    tensor_files(folder)  # refuses damaged files
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {k: v for k, v in settings.items() if k not in _IGNORED_SETTINGS}
    return hashlib.sha256(b"".join([json.dumps(kept, sort_keys=True).encode(), *digests_of(files, tell)])).digest()


def of_random(shape: str, seed: int) -> bytes:
    """Return the fingerprint of random weights that are the same in every process."""
    return hashlib.sha256(f"random:{shape}:{seed}".encode()).digest()
