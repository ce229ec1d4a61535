"""Daemon address: where a worker's cache daemon listens, from its settings."""

from __future__ import annotations

from kvsidecar.errors import ConfigurationError
from kvsidecar.net.channel import ServiceAddress

from inference_svc.server.worker_config import WorkerConfig

_FILES = ("cache_token_file", "cache_ca", "cache_cert", "cache_key")


def daemon_address(config: WorkerConfig) -> ServiceAddress | None:
    """Return the address of the worker's daemon; None without a daemon.

    Raises ConfigurationError for contradicting settings and for unusable files.
    """
    if config.cache_address:
        if config.cache_socket is not None and "cache_socket" in config.model_fields_set:
            raise ConfigurationError(
                f"cache_address is {config.cache_address} and cache_socket is {config.cache_socket}; a worker has one "
                "daemon: leave one of them out"
            )
        return ServiceAddress.remote(
            config.cache_address, config.cache_token_file, config.cache_ca, config.cache_cert, config.cache_key
        )
    for name in _FILES:
        if getattr(config, name) is not None:
            raise ConfigurationError(
                f"{name} is for a daemon at cache_address, which is not set; set it, or leave it out"
            )
    return ServiceAddress(config.cache_socket) if config.cache_socket is not None else None
