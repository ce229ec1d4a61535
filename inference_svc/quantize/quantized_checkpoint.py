"""Folder of a quantized model: configuration and files copied from the original."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.models.model_library import atomic_folder, check_disk_space

REPORT = "quantized.json"
# Files that are copied: tokenizer, chat template, sampling defaults, licences.
_COPIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "LICEN[CS]E*",
    "NOTICE*",
)


def check_output(out: Path) -> None:
    """Raise ConfigurationError for a folder that exists or cannot be created."""
    if out.exists() or out.is_symlink():
        raise ConfigurationError(f"{out} is there already; --out names a folder that is not")
    if not out.parent.is_dir():
        raise ConfigurationError(f"there is no folder {out.parent}, in which {out.name} could be")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(f"cannot write to {out.parent}: permission denied")


@contextmanager
def building(out: Path, size_bytes: int) -> Iterator[Path]:
    """Context with a temporary folder that becomes ``out`` if the ``with`` block succeeds.

    After an error the folder is removed. Raises ConfigurationError if the disk has no space for ``size_bytes``.
    """
    check_output(out)
    check_disk_space("writing the model", size_bytes, out.parent)
    partial = out.with_name(f".partial-{out.name}-{os.getpid()}")
    try:
        with atomic_folder(out, partial):
            yield partial
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror or error}") from error


def write_metadata(source: Path, target: Path, group: int, tied: bool) -> None:
    """Write the configuration of the 4-bit model, and copy the original's other files, such as the tokenizer.

    ``tied`` is true if the head is tied to the embedding, and is then not among the written weights. Raises
    ModelUnsupported.
    """
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"cannot read {source / 'config.json'}: {error}") from error
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "float16"
    config["tie_word_embeddings"] = tied
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in sorted({f for pattern in _COPIED_FILES for f in source.glob(pattern) if f.is_file()}):
        shutil.copyfile(file, target / file.name)
