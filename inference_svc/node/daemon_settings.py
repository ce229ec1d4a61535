"""Daemon settings: how the daemon of a node will use memory and disk, read before it starts.

The supervisor divides memory among the workers, and decides about their overflow, by these values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvsidecar.cli.exec_service import settings_of
from kvsidecar.cli.service_settings import read_settings


@dataclass(frozen=True)
class DaemonSettings:
    """Memory of a node's daemon on this machine, and the privacy of its store."""

    arena_bytes: int
    """Size of the arena in host memory."""
    staging_bytes: int
    """Staging memory of each worker."""
    index_bytes: int
    """Memory for the index of chunks, if it is given; 0 if the daemon chooses it from what the others leave."""
    private_store: bool
    """No store or an encrypted store: keys and values must not overflow to a plain file."""


def read_daemon_settings(flags: Mapping[str, object]) -> DaemonSettings:
    """Read the settings as a daemon with these flags does: flags, then its environment variables, then defaults.

    Raises ConfigurationError.
    """
    config = read_settings(settings_of("daemon"), dict(flags), None)
    private = config.store is None or bool(config.store_key.get_secret_value()) or config.store_key_file is not None
    return DaemonSettings(config.host_arena_bytes, config.staging_bytes, config.index_bytes, private)


def remote_daemon_settings() -> DaemonSettings:
    """Return the settings of a daemon on another host, which takes no memory here.

    Its store is unknown. A key for a store in this node's environment shows that the operator encrypts stores.
    """
    encrypted = any(os.environ.get(f"KVSIDECAR_CACHE_STORE_KEY{of}") for of in ("", "_FILE"))
    return DaemonSettings(arena_bytes=0, staging_bytes=0, index_bytes=0, private_store=encrypted)
