"""Planned memory of a node (arena, staging, index, KV pools), compared with the machine and its control groups."""

from __future__ import annotations

import structlog
from kvsidecar.byte_sizes import format_size
from kvsidecar.process.free_memory import memory_limit_bytes

from inference_svc.node.daemon_settings import DaemonSettings
from inference_svc.server.preflight import has_host_pool
from inference_svc.server.worker_config import ModelSettings

log = structlog.get_logger("serve")


def warn_of_planned_memory(worker: ModelSettings, num_workers: int, daemon: DaemonSettings) -> None:
    """Warn if the planned memory exceeds the available memory. The model's weights are not part of the plan."""
    arena, staging = daemon.arena_bytes, num_workers * daemon.staging_bytes
    on_host = has_host_pool(worker)
    beyond = 0 if on_host or worker.overflow_bytes == "auto" else worker.overflow_bytes
    limit, pools = memory_limit_bytes(), num_workers * (worker.planned_pool_bytes if on_host else beyond)
    if arena + staging + daemon.index_bytes + pools > limit:
        log.warning(
            "memory is planned above the limit; when it fills, the kernel ends a process (kvsidecar size tells what to "
            "plan)",
            arena=format_size(arena),
            staging=format_size(staging),
            index=format_size(daemon.index_bytes) if daemon.index_bytes else "what they leave",
            pools=format_size(pools),
            limit=format_size(limit),
        )
