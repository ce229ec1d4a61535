"""Cache salt of a vLLM request, and the number of its tokens that may be cached."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvsidecar.keys import text_salt

# UTF-8 text never contains the byte 0xff, so no client can choose a cache_salt that equals one of these salts.
_ADAPTER = b"\xffkvsidecar/lora/1"
_SINCE = b"\xffkvsidecar/since/1"


_Stamps = tuple[tuple[Path, int, int], ...]
"""A triple for each file: its path, modification time in nanoseconds, and size in bytes."""


class UnknownAdapter(Exception):
    """The weights of a LoRA adapter cannot be identified."""


class AdapterDigests:
    """Digests of one engine's LoRA adapters.

    vLLM loads an adapter once for each ``lora_int_id`` and keeps its weights in memory even if the files change. So an
    adapter whose files have changed can no longer be identified.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, _Stamps] = {}

    def digest_of(self, lora: Any) -> bytes:
        """Return a digest of the weights of a ``LoRARequest``. Raises UnknownAdapter."""
        try:
            stamps = _stamps(Path(lora.lora_path).expanduser())
            if not any(file.suffix != ".json" for file, _, _ in stamps):
                raise UnknownAdapter(f"the LoRA adapter {lora.lora_name} has no weights at {lora.lora_path}")
            if self._loaded.setdefault(lora.lora_int_id, stamps) != stamps:
                raise UnknownAdapter(f"the files of the LoRA adapter {lora.lora_name} changed after it was loaded")
            return _contents(stamps)
        except (OSError, RuntimeError) as error:  # expanduser raises RuntimeError without a home directory
            raise UnknownAdapter(f"the LoRA adapter {lora.lora_name} cannot be read: {error}") from error


def request_salt(request: Any, adapters: AdapterDigests) -> bytes:
    """Return the salt of a vLLM ``Request``. Raises UnknownAdapter.

    It depends on the request's ``cache_salt`` and LoRA adapter.
    """
    text = request.cache_salt or ""
    if request.lora_request is not None:
        salt, adapter = text.encode("utf-8", "surrogatepass"), adapters.digest_of(request.lora_request)
        return _ADAPTER + hashlib.sha256(len(salt).to_bytes(4, "little") + salt + adapter).digest()
    return text_salt(text)


def generation_salt(generation: bytes, salt: bytes) -> bytes:
    """Return the salt for chunks that were computed with a generation of the weights.

    The engine starts with the empty generation, which leaves the salt unchanged. A new generation begins when vLLM
    changes its weights in place.
    """
    return _SINCE + hashlib.sha256(generation + salt).digest() if generation else salt


def cacheable_tokens(request: Any) -> int:
    """Return the number of leading tokens that may be cached.

    The keys and values of a cached token must depend only on token ids. These are the tokens before the first image or
    sound. If the prompt consists of embeddings, there are none.
    """
    if request.prompt_embeds is not None:
        return 0
    inputs = request.mm_features or []
    return int(min((one.mm_position.offset for one in inputs), default=request.num_tokens))


def _stamps(folder: Path) -> _Stamps:
    files = sorted(f for f in folder.glob("*") if f.suffix in (".safetensors", ".json", ".bin", ".pt"))
    return tuple((f, s.st_mtime_ns, s.st_size) for f in files if (s := f.stat()))


@lru_cache(maxsize=256)
def _contents(stamps: _Stamps) -> bytes:
    """Return the SHA-256 of files. The result is cached until a file changes."""
    digest = hashlib.sha256()
    for file, _, size in stamps:
        digest.update(file.name.encode() + b"\0" + size.to_bytes(8, "little"))
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.digest()
