"""Cache salt of a vLLM request, and the number of its tokens that may be cached."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
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

    vLLM loads an adapter once for each ``lora_int_id``, and again from another path only with ``load_inplace``. It
    keeps the weights in memory even if the files change. So an adapter whose files have changed can no longer be
    identified. A thread reads the files, which may take seconds.
    """

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._loaded: dict[tuple[int, str], _Stamps] = {}
        self._digests: dict[_Stamps, Future[bytes]] = {}
        self._thread = ThreadPoolExecutor(1, "kvsidecar-adapters")

    def is_pending(self, lora: Any) -> bool:
        """Return whether ``digest_of`` would wait for the thread, which then reads the adapter's files."""
        try:
            return not self._digest(self._checked_stamps(lora)).done()
        except UnknownAdapter:
            return False

    def digest_of(self, lora: Any) -> bytes:
        """Return a digest of the weights of a ``LoRARequest``. Raises UnknownAdapter."""
        stamps = self._checked_stamps(lora)
        try:
            return self._digest(stamps).result()
        except OSError as error:
            del self._digests[stamps]  # the next request tries again
            raise _unreadable(lora, error) from error

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _checked_stamps(self, lora: Any) -> _Stamps:
        try:
            stamps = _stamps(Path(lora.lora_path).expanduser())
        except (OSError, RuntimeError) as error:  # expanduser raises RuntimeError without a home directory
            raise _unreadable(lora, error) from error
        if not any(file.suffix != ".json" for file, _, _ in stamps):
            raise UnknownAdapter(f"the LoRA adapter {lora.lora_name} has no weights at {lora.lora_path}")
        if getattr(lora, "load_inplace", False):
            self._paths[lora.lora_int_id] = lora.lora_path
        loaded_from = self._paths.setdefault(lora.lora_int_id, lora.lora_path)
        if loaded_from != lora.lora_path:
            raise UnknownAdapter(f"vLLM uses the LoRA adapter {lora.lora_name} of {loaded_from}, not {lora.lora_path}")
        if self._loaded.setdefault((lora.lora_int_id, lora.lora_path), stamps) != stamps:
            raise UnknownAdapter(f"the files of the LoRA adapter {lora.lora_name} changed after it was loaded")
        return stamps

    def _digest(self, stamps: _Stamps) -> Future[bytes]:
        found = self._digests.get(stamps)
        if found is None:
            found = self._digests[stamps] = self._thread.submit(_contents, stamps)
        return found


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


def _unreadable(lora: Any, error: Exception) -> UnknownAdapter:
    return UnknownAdapter(f"the LoRA adapter {lora.lora_name} cannot be read: {error}")


def _stamps(folder: Path) -> _Stamps:
    files = sorted(f for f in folder.glob("*") if f.suffix in (".safetensors", ".json", ".bin", ".pt"))
    return tuple((f, s.st_mtime_ns, s.st_size) for f in files if (s := f.stat()))


def _contents(stamps: _Stamps) -> bytes:
    """Return the SHA-256 of files."""
    digest = hashlib.sha256()
    for file, _, size in stamps:
        digest.update(file.name.encode() + b"\0" + size.to_bytes(8, "little"))
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.digest()
