"""Fingerprint of a model's weights: by content, not by name."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from kvsidecar.errors import ModelUnsupported

_SAMPLE_BYTES = 1024
_IGNORED_SETTINGS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}


def of_directory(folder: Path) -> bytes:
    """Return SHA-256 over config.json and samples of the weights.

    The samples are the header of each safetensors file, and parts of every tensor. Raises ModelUnsupported without
    safetensors files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelUnsupported(f"{folder} holds no .safetensors file; save the model with safetensors")
    digest = hashlib.sha256()
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {k: v for k, v in settings.items() if k not in _IGNORED_SETTINGS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for file in files:
        _add_file(digest, file)
    return digest.digest()


def _add_file(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as data:
        head = data.read(8)
        if len(head) < 8:
            raise ModelUnsupported(f"{file} is truncated: {len(head)} bytes")
        (length,) = struct.unpack("<Q", head)
        if length > file.stat().st_size:
            raise ModelUnsupported(f"{file} is not a safetensors file, or is truncated")
        header = data.read(length)
        digest.update(header)
        for name, tensor in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            for at in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                data.seek(8 + length + at)
                digest.update(data.read(min(_SAMPLE_BYTES, end - begin)))


def of_random(shape: str, seed: int) -> bytes:
    """Return the fingerprint of random weights that are the same in every process."""
    return hashlib.sha256(f"random:{shape}:{seed}".encode()).digest()
