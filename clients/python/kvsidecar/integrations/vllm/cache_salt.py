"""Cache salt of a vLLM request, and the number of its tokens that may be cached."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvsidecar.keys import MAX_SALT_BYTES

# UTF-8 text never contains the first byte, so no client can choose a cache_salt that equals an adapter's salt.
_ADAPTER = b"\xffkvsidecar/lora/1"
_LONG = b"\xffkvsidecar/salt/1"
_SINCE = b"\xffkvsidecar/since/1"


_Stamps = tuple[tuple[Path, int, int], ...]
"""Files with their modification times in nanoseconds and their sizes in bytes."""


class UnknownAdapter(Exception):
    """The weights of a LoRA adapter cannot be identified."""


class AdapterDigests:
    """Digests of the LoRA adapters of one engine.

    vLLM loads an adapter once for each ``lora_int_id`` and keeps these weights, even if the files change.
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
    salt = (request.cache_salt or "").encode("utf-8", "surrogatepass")
    if request.lora_request is not None:
        adapter = adapters.digest_of(request.lora_request)
        return _ADAPTER + hashlib.sha256(len(salt).to_bytes(4, "little") + salt + adapter).digest()
    return salt if len(salt) <= MAX_SALT_BYTES else _LONG + hashlib.sha256(salt).digest()


def generation_salt(generation: bytes, salt: bytes) -> bytes:
    """Return the salt for chunks computed in a weights generation.

    The empty generation, in which the engine starts, leaves the salt unchanged.
    """
    return _SINCE + hashlib.sha256(generation + salt).digest() if generation else salt


def cacheable_tokens(request: Any) -> int:
    """Return the number of leading tokens that may be cached.

    Only tokens whose keys and values depend on token ids alone may be cached: the tokens before the first image or
    sound, and no tokens of a prompt that consists of embeddings.
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
    """Return SHA-256 over files; cached until a file changes."""
    digest = hashlib.sha256()
    for file, _, size in stamps:
        digest.update(file.name.encode() + b"\0" + size.to_bytes(8, "little"))
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.digest()
