"""Under which salt a request's text is kept, and how much of it may be."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvsidecar.keys import MAX_SALT_BYTES

# No text in UTF-8 has this byte, so no cache_salt can be chosen that is an adapter's.
_ADAPTER = b"\xffkvsidecar/lora/1"
_LONG = b"\xffkvsidecar/salt/1"
_SINCE = b"\xffkvsidecar/since/1"


class Unidentified(Exception):
    """Nobody can say what the adapter's weights are."""


def salt_of(request: Any) -> bytes:
    """The salt of a vLLM ``Request``: its ``cache_salt``, and what its LoRA adapter contains. Raises Unidentified."""
    salt = (request.cache_salt or "").encode("utf-8", "surrogatepass")
    if request.lora_request is not None:
        adapter = _adapter(request.lora_request)
        return _ADAPTER + hashlib.sha256(len(salt).to_bytes(4, "little") + salt + adapter).digest()
    return salt if len(salt) <= MAX_SALT_BYTES else _LONG + hashlib.sha256(salt).digest()


def since(generation: bytes, salt: bytes) -> bytes:
    """A salt of what is computed from some moment on; itself for the empty generation, which began with the engine."""
    return _SINCE + hashlib.sha256(generation + salt).digest() if generation else salt


def cacheable_tokens(request: Any) -> int:
    """How many leading tokens say all that their keys and values depend on: those before the first image or sound, and
    none of a prompt that is given as embeddings."""
    if request.prompt_embeds is not None:
        return 0
    inputs = request.mm_features or []
    return int(min((one.mm_position.offset for one in inputs), default=request.num_tokens))


def _adapter(lora: Any) -> bytes:
    files = [f for f in Path(lora.lora_path).glob("*") if f.suffix in (".safetensors", ".json", ".bin", ".pt")]
    if not any(f.suffix != ".json" for f in files):
        raise Unidentified(f"the LoRA adapter {lora.lora_name} has no weights at {lora.lora_path}")
    stamps = tuple((f, s.st_mtime_ns, s.st_size) for f in sorted(files) if (s := f.stat()))
    return _contents(stamps)


@lru_cache(maxsize=256)
def _contents(stamps: tuple[tuple[Path, int, int], ...]) -> bytes:
    """SHA-256 over files; read again when one changed."""
    digest = hashlib.sha256()
    for file, _, size in stamps:
        digest.update(file.name.encode() + b"\0" + size.to_bytes(8, "little"))
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.digest()
