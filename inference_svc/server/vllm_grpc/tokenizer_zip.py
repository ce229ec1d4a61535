"""Tokenizer zip: an archive of a tokenizer's files, for routers without the model."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from kvsidecar.errors import FailedPrecondition

_NAMES = (
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
_PATTERNS = ("*.jinja", "*.model", "*.tiktoken")


def zip_tokenizer(folder: Path) -> bytes:
    """Zip a tokenizer's files.

    Equal files give equal bytes, because routers identify the archive by its SHA-256. Raises FailedPrecondition if the
    folder has no tokenizer files.
    """
    found = {path for name in (*_NAMES, *_PATTERNS) for path in folder.glob(name) if path.is_file()}
    if not found:
        raise FailedPrecondition(f"{folder} has no files of a tokenizer; give the router the model's tokenizer itself")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in sorted(found):
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()
