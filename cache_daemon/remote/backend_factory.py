"""Creates the backend of an address, and imports its client only then."""

from __future__ import annotations

from cache_daemon.remote.address import Credentials, RemoteAddress
from cache_daemon.remote.backend import RemoteBackend


def new_backend(address: RemoteAddress, credentials: Credentials) -> RemoteBackend:
    """Return the backend of an address, not yet connected.

    Raises ConfigurationError if the client is not installed.
    """
    if address.backend == "s3":
        from cache_daemon.remote.object_store_backend import S3Backend

        return S3Backend(address, credentials)
    if address.backend == "azure":
        from cache_daemon.remote.object_store_backend import AzureBackend

        return AzureBackend(address, credentials)
    from cache_daemon.remote.redis_backend import RedisBackend

    return RedisBackend(address, credentials)
