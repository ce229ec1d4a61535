"""LoRA administration: loads and unloads adapters while requests run.

Adapters are loaded only from folders below ``--lora-root``, one at a time. The engine's thread only computes a trial
row. Everything else runs on other threads, so that requests continue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
from kvsidecar import keys
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, FailedPrecondition, InvalidRequest, KVSidecarError, LimitExceeded
from kvsidecar.process.free_memory import free_bytes
from kvsidecar.process.malloc_tuning import trim_freed_memory

from inference_svc.lora.adapter_dir import WEIGHTS, open_adapter_dir
from inference_svc.lora.adapter_weights import Linears, linears_of, read_weights
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.lora.peft_config import CONFIG
from inference_svc.models.attention_windows import ATTENTION_NAME
from inference_svc.server.daemon_address import daemon_address
from inference_svc.server.runtime import Runtime, log_adapter_ready
from inference_svc.server.worker_config import ADAPTER_NAME, ADAPTER_NAME_RULE, MAX_ADAPTERS
from inference_svc.server.worker_model import daemon_connection

T = TypeVar("T")
_ATTACH_SECONDS = 1.0

log = structlog.get_logger("worker")


class LoraAdmin:
    """Administration of a worker's adapters.

    The methods block. Any thread may call them. For a bad request they raise KVSidecarError.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._engine, self._config = runtime, runtime.engine, runtime.config
        self._lock = threading.Lock()
        loaded, allowed = runtime.engine.loaded, runtime.config.lora_root is not None
        # Done before requests run, because transformers sets torch's default dtype for all threads during the call.
        self._linears: Linears = linears_of(loaded.config, loaded.dtype, ATTENTION_NAME) if allowed else {}

    def load(self, name: str, path: str, namespace: bytes = b"") -> LoraAdapter:
        """Load an adapter from a folder below the root.

        Loading the same adapter again has no effect. Another adapter with the same name is refused, so that a name
        never changes its meaning. If ``namespace`` is given, an adapter with another namespace is refused.
        """
        root = self._root()
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:100]!r} is no name for an adapter: that has {ADAPTER_NAME_RULE}", param="name"
            )
        if name == self._engine.loaded.id:
            raise InvalidRequest(f"the model is called {name!r}; choose another name", param="name")
        with self._lock:
            return _on_short_lived_thread(lambda: self._load(name, _resolve_below(root, path), namespace))

    def unload(self, name: str) -> None:
        """Unload an adapter, and end its requests and its session with the daemon."""
        self._root()
        with self._lock:
            self._unload(name)
        trim_freed_memory()
        log.info("adapter unloaded", adapter=name)

    def _root(self) -> Path:
        if self._config.lora_root is None:
            raise FailedPrecondition("adapters come and go only where the worker was started with --lora-root DIR")
        return self._config.lora_root.expanduser().resolve()

    def _load(self, name: str, folder: Path, namespace: bytes) -> LoraAdapter:
        loaded = self._engine.loaded
        try:
            opened = open_adapter_dir(name, folder)
            free = free_bytes(self._config.memory_bytes)
            if opened.max_bytes > free:
                raise LimitExceeded(
                    f"LoRA adapter {name} may take {format_size(opened.max_bytes)} of memory, and {format_size(free)} "
                    "are free; unload another one first"
                )
            weights = read_weights(opened, self._linears, loaded.id)
        except (ConfigurationError, OSError) as error:
            raise InvalidRequest(str(error), param="path") from error
        descriptor = loaded.descriptor(self._config.storage_bits, weights.fingerprint)
        if namespace and keys.namespace_id(descriptor) != namespace:
            raise FailedPrecondition(f"{folder} does not have the adapter that other workers have as {name!r}")
        there = self._engine.adapters.get(name)
        if there is not None and there.fingerprint == weights.fingerprint:
            return there
        if there is not None:
            raise InvalidRequest(f"another adapter is called {name!r}; unload it first", param="name")
        if len(self._engine.adapters) >= MAX_ADAPTERS:
            raise LimitExceeded(f"there are {MAX_ADAPTERS} adapters, the most allowed; unload one first")
        new = self._attach(name, weights.fingerprint)
        try:
            adapter = self._engine.adopt(weights)
        except BaseException as error:
            if new:
                self._detach(weights.fingerprint)
            if isinstance(error, KVSidecarError) or not isinstance(error, Exception):
                raise
            raise KVSidecarError(f"LoRA adapter {name} cannot be computed here: {error}") from error
        self._engine.between_steps(lambda: log_adapter_ready(adapter, loaded))
        return adapter

    def _unload(self, name: str) -> None:
        gone = self._engine.drop(name)
        if all(one.fingerprint != gone.fingerprint for one in dict(self._engine.adapters).values()):
            self._detach(gone.fingerprint)

    def _attach(self, name: str, fingerprint: bytes) -> bool:
        """Open an adapter's session with the daemon before its first request; False if it has a session already."""
        cache, address = self._runtime.cache, daemon_address(self._config)
        if cache is None or address is None or cache.has_adapter(fingerprint):
            return False
        link = daemon_connection(address, self._config, self._engine.loaded, fingerprint, name)
        cache.add_adapter(fingerprint, link)
        link.wait(_ATTACH_SECONDS)
        return True

    def _detach(self, fingerprint: bytes) -> None:
        if self._runtime.cache is not None:
            self._runtime.cache.remove_adapter(fingerprint)


def _resolve_below(root: Path, path: str) -> Path:
    """Resolve a folder below the root, following symbolic links.

    The error does not reveal whether a folder outside the root exists.
    """
    refusal = InvalidRequest(f"{path[:200]!r} is no folder below --lora-root", param="path")
    try:
        folder = (root / path).resolve()
        folder.is_dir()  # raises for a name that is too long
        if folder == root or not folder.is_relative_to(root):
            raise refusal
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).resolve().is_relative_to(root):
                raise InvalidRequest(f"{name} of {path[:200]!r} is a link that leads out of --lora-root", param="path")
    except (OSError, ValueError, RuntimeError) as error:  # the name is too long or has a NUL, or links form a cycle
        raise refusal from error
    return folder


def _on_short_lived_thread(work: Callable[[], T]) -> T:
    """Run ``work`` on a thread that ends after it; ``runtime.build_runtime`` explains why."""
    with ThreadPoolExecutor(1, "load") as thread:
        return thread.submit(work).result()
