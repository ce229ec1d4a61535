"""Overflow builder: location and size of the overflow of a worker's pool."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import structlog
from kvkernels.cpu import cpu_attention
from kvkernels.device.device_port import DeviceLacks
from kvkernels.device.visible_devices import device_of
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError
from kvsidecar.process.free_memory import free_bytes
from kvsidecar.process.runtime_dir import ensure_private_dir

from inference_svc.kv_pool.disk_overflow import DiskOverflow
from inference_svc.kv_pool.host_overflow import HostOverflow
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.overflow import Overflow
from inference_svc.models.loader import LoadedModel
from inference_svc.server.worker_config import WorkerConfig

log = structlog.get_logger("worker")

# The overflow takes at most 1/4 of a disk's free space.
_SHARE_OF_FREE = 4
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def open_overflow(config: WorkerConfig, loaded: LoadedModel, pool_tokens: int) -> Overflow | None:
    """Open the overflow of a pool of ``pool_tokens`` tokens: on disk for a CPU, in host memory for a device.

    None if the overflow is off or not needed; with ``auto``, also on a device, and if no overflow is possible. Raises
    ConfigurationError if the configured size is impossible, torch.OutOfMemoryError if a device has too little memory
    for the pool.
    """
    per_token = KVPool.bytes_per_token(loaded.layers, loaded.kv_heads, loaded.head_dim, loaded.dtype)
    shape = (loaded.layers, loaded.kv_heads, loaded.head_dim)
    if config.overflow_bytes == "auto":
        if loaded.device.type != "cpu" or loaded.context_length <= pool_tokens or _reclaims_window(loaded):
            return None
        try:
            tokens = min(loaded.context_length, _free_disk_bytes(config.overflow_dir) // _SHARE_OF_FREE // per_token)
            if tokens <= pool_tokens:
                raise ConfigurationError(f"the disk of {config.overflow_dir} has too little room")
            found = DiskOverflow(config.overflow_dir, *shape, pool_tokens, tokens, loaded.dtype)
        except (ConfigurationError, OSError) as error:
            log.info("no request may have more tokens than the pool holds", tokens=pool_tokens, reason=str(error))
            return None
    else:
        if not config.overflow_bytes:
            return None
        asked = f"overflow_bytes is {format_size(config.overflow_bytes)}"
        tokens = min(loaded.context_length, config.overflow_bytes // per_token)
        if tokens <= pool_tokens < loaded.context_length:
            raise ConfigurationError(
                f"{asked}, which holds {tokens} tokens; the pool itself holds {pool_tokens}: it must be larger than "
                f"{format_size(pool_tokens * per_token)}, or 0"
            )
        if loaded.context_length <= pool_tokens or _reclaims_window(loaded):
            return None
        if loaded.device.type != "cpu":
            return _open_on_host(asked, loaded, pool_tokens, tokens)
        ensure_private_dir(config.overflow_dir)
        found = DiskOverflow(config.overflow_dir, *shape, pool_tokens, tokens, loaded.dtype)
    log.info("requests larger than the pool use disk overflow", tokens=tokens, most=format_size(found.size_bytes))
    return found


def _open_on_host(asked: str, loaded: LoadedModel, pool_tokens: int, tokens: int) -> HostOverflow:
    shape, free = (loaded.layers, loaded.kv_heads, loaded.head_dim), free_bytes()
    needed = KVPool.bytes_per_token(*shape, loaded.dtype) * tokens
    if needed > free:
        raise ConfigurationError(
            f"{asked}, of which this model's context needs {format_size(needed)}; {format_size(free)} of host memory "
            "are free"
        )
    try:
        found = HostOverflow(device_of(loaded.device).extended, *shape, pool_tokens, tokens, loaded.dtype)
    except DeviceLacks as error:
        raise ConfigurationError(
            f"{asked}, and {loaded.device} cannot extend its pool into host memory: {error}; leave it out"
        ) from error
    log.info("requests larger than the pool use host memory", tokens=tokens, most=format_size(found.size_bytes))
    return found


def _reclaims_window(loaded: LoadedModel) -> bool:
    """True if all layers have a window: then the pool frees blocks behind the window, and no request needs overflow."""
    own = loaded.device.type == "cpu" and cpu_attention.serves(loaded.dtype, loaded.head_dim)
    return own and bool(loaded.windows) and all(loaded.windows)


def _free_disk_bytes(folder: Path) -> int:
    """Create a folder and return the free bytes of its disk.

    Raises ConfigurationError if the folder cannot be used or is in memory.
    """
    ensure_private_dir(folder)
    at = folder.resolve()
    mounts = {Path(p.mountpoint): p.fstype for p in psutil.disk_partitions(all=True)}
    kind = next((mounts[p] for p in (at, *at.parents) if p in mounts), "")
    if kind in _IN_MEMORY:
        raise ConfigurationError(f"{folder} is in memory ({kind}); choose another folder with --overflow-dir")
    return shutil.disk_usage(folder).free
