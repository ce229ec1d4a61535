"""Training corpora as one stream of token ids; a part is held out for evaluation."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HELD_OUT_PERCENT = 2
_FEWEST_TOKENS = 1024  # a row of training or evaluation has 513


def dialogues(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield conversations as ``[(role, text), ...]`` from a JSONL file with a ``turns`` list."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            turns = json.loads(line)["turns"]
            yield [("user" if str(t[0]).lower().startswith("u") else "assistant", str(t[1])) for t in turns if t[1]]


def documents(path: Path) -> Iterator[str]:
    """Yield the text files of a tar archive."""
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.isfile() or not member.name.endswith((".rst", ".md")):
                continue
            handle = archive.extractfile(member)
            if handle is not None:
                yield handle.read().decode("utf-8", "replace")


def render_chat(turns: list[tuple[str, str]]) -> str:
    """Render a conversation with the tokenizer's chat template, as text."""
    return "".join(f"<|{role}|>{text}<|end|>" for role, text in turns)


def texts(dialogue_files: list[Path], document_files: list[Path]) -> Iterator[str]:
    for path in dialogue_files:
        for turns in dialogues(path):
            yield render_chat(turns)
    for path in document_files:
        for text in documents(path):
            yield f"<|doc|>{text}<|end|>"


def is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % 100 < HELD_OUT_PERCENT


def encode(
    tokenizer: Tokenizer, dialogue_files: list[Path], document_files: list[Path], cache: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(training, held_out)`` uint16 token streams.

    The first call with a tokenizer and its files builds the streams and caches them under ``cache``. Raises SystemExit
    if the files have too little text.
    """
    inputs = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in (*dialogue_files, *document_files)]
    identity = hashlib.sha256(f"{tokenizer.to_str()}{inputs}".encode()).hexdigest()[:16]
    files = cache / f"train-{identity}.npy", cache / f"held_out-{identity}.npy"
    if not all(f.exists() for f in files):
        streams: tuple[list[int], list[int]] = ([], [])
        batch = list(texts(dialogue_files, document_files))
        for text, encoded in zip(batch, tokenizer.encode_batch(batch), strict=True):
            streams[is_held_out(text)].extend(encoded.ids)
        for name, stream in zip(("training", "held-out"), streams, strict=True):
            if len(stream) < _FEWEST_TOKENS:
                raise SystemExit(f"the files have {len(stream)} {name} tokens; allowed are at least {_FEWEST_TOKENS}")
        cache.mkdir(parents=True, exist_ok=True)
        for stream, file in zip(streams, files, strict=True):
            np.save(file, np.asarray(stream, dtype=np.uint16))
    return np.load(files[0], mmap_mode="r"), np.load(files[1], mmap_mode="r")
