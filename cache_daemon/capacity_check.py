"""Checks sizes at the start: arena, staging and index against memory, the store against its file system.

Without these checks the kernel may kill the daemon for lack of memory, or the disk may be full after a week, and no
message would name the setting that is too large.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError
from kvsidecar.process.free_memory import memory_limit_bytes

from cache_daemon.config import DaemonConfig
from cache_daemon.durable.disk_space import DiskSpace

# Memory of the process in addition to arena and staging: code, a small index, and buffers.
PROCESS_BYTES = 128 << 20
_MIN_INDEX_BYTES = 64 << 20

log = structlog.get_logger("cache_daemon")


def check_capacity(config: DaemonConfig) -> None:
    """Refuse an arena that memory cannot hold; warn of sizes that may not fit later. Raises ConfigurationError."""
    _check_memory(config)
    if config.store is not None:
        _check_store(config.store, config.store_bytes)


def index_bytes(config: DaemonConfig) -> int:
    """Return the memory for the index.

    By default, it is a quarter of what arena and staging leave: a start reads all headers, which takes twice the
    memory, and workers run beside the daemon.
    """
    left = memory_limit_bytes() - config.host_arena_bytes - config.staging_bytes - PROCESS_BYTES
    return config.index_bytes or max(_MIN_INDEX_BYTES, left // 4)


def _check_memory(config: DaemonConfig) -> None:
    limit, arena = memory_limit_bytes(), config.host_arena_bytes
    if arena > limit:
        raise ConfigurationError(
            f"arena_bytes is {format_size(arena)}, and this process may have {format_size(limit)} of memory (machine "
            f"and control group); choose at most {format_size(max(0, limit - PROCESS_BYTES - config.staging_bytes))}, "
            "or raise the limit"
        )
    # An index whose size the daemon chooses fits into what the others leave.
    planned = arena + config.staging_bytes + config.index_bytes + PROCESS_BYTES
    if planned > limit:
        log.warning(
            "memory is planned above the limit; the kernel may end this process when the arena is full",
            arena=format_size(arena), staging_of_one_worker=format_size(config.staging_bytes),
            index=format_size(index_bytes(config)), process=format_size(PROCESS_BYTES), limit=format_size(limit),
        )  # fmt: skip
    if "staging_bytes" in config.model_fields_set and config.staging_bytes > arena > 0:
        log.warning(
            "staging is larger than the arena, to which its chunks are copied; the difference is never used",
            staging_bytes=format_size(config.staging_bytes), arena_bytes=format_size(arena),
        )  # fmt: skip


def _check_store(folder: Path, budget_bytes: int) -> None:
    """Warn if the store can grow beyond its file system. Opening the store reports a folder that cannot be read."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        found = os.statvfs(there)
        used = sum(path.stat().st_blocks * 512 for path in folder.glob("*.mdb"))
    except OSError:
        return
    free, most = found.f_bavail * found.f_frsize + used, DiskSpace(budget_bytes).max_bytes
    if most > free:
        log.warning(
            "the store can grow beyond its file system; on a full disk it evicts chunks and retries writes",
            store_bytes=format_size(budget_bytes), file_up_to=format_size(most), free=format_size(free),
            folder=str(folder),
        )  # fmt: skip
