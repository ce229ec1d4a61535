"""The daemon's settings: flags over ``KVSIDECAR_CACHE_*`` over defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvsidecar.runtime import default_data_dir, default_runtime_dir
from kvsidecar.sizes import parse_size
from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class DaemonConfig(BaseSettings):
    """Everything that the daemon can be told."""

    model_config = SettingsConfigDict(env_prefix="KVSIDECAR_CACHE_", extra="forbid", frozen=True)

    socket: Path = Field(default_factory=lambda: default_runtime_dir() / "cache.sock")
    """Unix socket to listen on; created with mode 0600."""
    tcp: str = ""
    """Additional ``host:port``, for remote clients and probes. Off by default; there is no authentication."""
    store: Path | None = Field(default_factory=lambda: default_data_dir() / "store")
    """Folder of the durable store; None keeps nothing on disk."""
    arena_bytes: int = 1 << 30
    """Size of the host arena."""
    arena_dir: Path = Path("/dev/shm")
    """A tmpfs to put the arena into."""
    gpu_arena: int = 0
    """Size of an arena in GPU memory that takes the place of the host arena; 0 for none. Needs cuda-bindings."""
    gpu_device: int = Field(default=0, ge=0)
    """The GPU to put it on."""
    gpu_memory: Literal["cuda", "host"] = "cuda"
    """host: the same exchange of descriptors with host memory behind it, for trying it out without a GPU."""
    store_bytes: int = 8 << 30
    """Budget of the durable store, in payload bytes."""
    durability: Literal["strict", "relaxed"] = "relaxed"
    """strict: every group commit is flushed with its meta page. relaxed: a power cut may undo the last group
    commit, never more, and never corrupts. Killing the process loses nothing in either."""
    heartbeat_ms: int = Field(default=2000, ge=50, le=60_000)
    """A session ends after three missed heartbeats."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint on 127.0.0.1; 0 for none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("arena_bytes", "gpu_arena", "store_bytes", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value

    @field_validator("arena_bytes", "gpu_arena")
    @classmethod
    def _arena_large_enough(cls, value: int, info: ValidationInfo) -> int:
        if value < 1 << 20 and not (value == 0 and info.field_name == "gpu_arena"):
            raise ValueError(f"{value} bytes is too small for an arena; at least 1MiB is needed")
        return value
