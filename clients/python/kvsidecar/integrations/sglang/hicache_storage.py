"""The storage backend class that SGLang loads."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvkernels.device.visible_devices import device_of, has_cuda
from kvkernels.paged_gather import Integers
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import ConfigurationError
from kvsidecar.integrations import engine_options
from kvsidecar.integrations.sglang.host_pool_layout import host_pool_cache
from kvsidecar.integrations.sglang.page_hints import PageHints
from kvsidecar.integrations.sglang.page_store import PageStore
from kvsidecar.integrations.torch_numerics import SHARED, torch_numerics
from kvsidecar.integrations.weights_dir import weights_dir_of
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.models import weights_fingerprint

log = logging.getLogger(__name__)
_ATTACH_SECONDS = 1.0
# The first SGLang version whose page hashes cover a request's LoRA adapter and salts (sgl-project/sglang#38577). Older
# versions hash only the tokens, and pass the storage nothing else about a request.
_MIN_VERSION = (0, 5, 20)


@dataclass(frozen=True)
class StorageSettings(engine_options.DaemonOptions):
    """Settings of the storage, in addition to the daemon's address."""

    bits: int = 16
    """Bits per stored key or value: 16, 8 or 4."""
    timeout_ms: int = 500
    """Timeout of a call that transfers no payload."""
    model: str = ""
    """The weights' folder or repository; needed if SGLang's ``--model-path`` is neither."""
    numerics: str = ""
    """Any text that describes settings outside of the model's files, such as ``--quantization``. Only engines with the
    same text share chunks."""
    share_across_machines: bool = False
    """Share chunks with engines on other machines and of other versions, whose keys and values may differ in bits."""


class KVSidecarStorage(HiCacheStorage):
    """SGLang storage backend that stores pages in the daemon; see ``docs/engines.md``.

    The constructor and ``register_mem_pool_host`` raise ConfigurationError for unsupported configurations.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, arguments: Any = None) -> None:
        given = storage_config.extra_config or {}
        self._config = storage_config
        self._settings = engine_options.parse_options(
            StorageSettings, given.get("kvsidecar", {}), 'the extra config\'s "kvsidecar"'
        )
        _check(storage_config, given)
        from sglang.srt.runtime_context import get_model  # versions that _check refuses may not have it

        model = get_model()
        self._folder = weights_dir_of(self._settings.model or model.model_path, model.download_dir, model.revision)
        self._store: PageStore | None = None
        self._hints = PageHints(1)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        cache = host_pool_cache(mem_pool_host, self._settings.bits)
        device = device_of(torch.device("cuda")).torch if has_cuda() else torch.device("cpu")
        numerics = torch_numerics(device, mem_pool_host.dtype, self._settings.share_across_machines)
        described = descriptor(self._config, self._settings, self._folder, cache.geometry, numerics)
        name = f"sglang-{self._config.tp_rank}"
        connection = DaemonConnection(self._settings.address, name, described, engine="sglang", log=log)
        connection.wait(_ATTACH_SECONDS)
        self._store = PageStore(cache, connection, self._settings.timeout_ms / 1000)
        self._hints = PageHints(cache.block_tokens)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._registered_store.exists(keys, self._hints.of_call(extra_info))

    def exists(self, key: str) -> bool:
        return self._registered_store.exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._registered_store.load(keys, self._slots(keys, host_indices), self._hints.of_call(extra_info))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._registered_store.store(keys, self._slots(keys, host_indices), self._hints.of_call(extra_info))

    def clear(self) -> None:
        self._registered_store.clear()

    # ---- SGLang's older interface, whose calls copy pages; "interface_v1" replaces it -------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        raise NotImplementedError(_V1)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError(_V1)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError(_V1)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError(_V1)

    @property
    def _registered_store(self) -> PageStore:
        if self._store is None:
            raise RuntimeError("no host pool was registered; SGLang does so before it asks for pages")
        return self._store

    def _slots(self, keys: list[str], host_indices: torch.Tensor) -> Integers:
        """Return the slots in the host pool, one for each token of each page.

        Raises ValueError if SGLang passed another number of slots.
        """
        expected = len(keys) * self.mem_pool_host.page_size
        if len(host_indices) != expected:
            raise ValueError(f"{len(host_indices)} indices for {len(keys)} pages; expected are {expected}")
        slots: Integers = host_indices.to("cpu", torch.int64).numpy()
        return slots


_V1 = 'KVSidecar copies pages in place; set "interface_v1": 1 in --hicache-storage-backend-extra-config'


def descriptor(
    config: Any, settings: StorageSettings, folder: Path, geometry: Geometry, numerics: str
) -> NamespaceDescriptor:
    """Return the namespace of one tensor-parallel rank.

    ``numerics`` is the result of ``torch_numerics``. The model's fingerprint covers its ``config.json``, too.
    """
    versions = f"sglang/{importlib.metadata.version('sglang')} torch/{torch.__version__}"
    return NamespaceDescriptor(
        model_fingerprint=weights_fingerprint.of_engine_directory(folder),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
        format_version=keys.FORMAT_VERSION,
        quantizer_version=0 if geometry.bits == 16 else keys.QUANTIZER_VERSION,
        bits=geometry.bits,
        tensor_parallel_rank=config.tp_rank,
        tensor_parallel_size=config.tp_size,
        producer=" ".join(["sglang" if numerics == SHARED else versions, settings.numerics, numerics]),
    )


def _check(config: Any, given: dict[str, Any]) -> None:
    """Raise ConfigurationError, which names the setting, for an unsupported version or setting."""
    version = importlib.metadata.version("sglang")
    if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < _MIN_VERSION:
        needed = ".".join(map(str, _MIN_VERSION))
        raise ConfigurationError(
            f"SGLang is {version}; to keep LoRA adapters and cache salts apart, KVSidecar needs {needed} or newer"
        )
    if not given.get("interface_v1"):
        raise ConfigurationError(_V1)
    if config.is_mla_model:
        raise ConfigurationError(
            "the model keeps latents (MLA) or the same on all ranks; KVSidecar keeps keys and values"
        )
    for name in ("pp_size", "attn_cp_size", "dcp_size"):
        if getattr(config, name, 1) != 1:
            raise ConfigurationError(f"{name} is {getattr(config, name)}; KVSidecar keeps the caches of engines with 1")
    if config.should_split_heads:
        raise ConfigurationError(
            "tp_lcm_size splits heads among engines; KVSidecar keeps pages of one size: leave it out"
        )
