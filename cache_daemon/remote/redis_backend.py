"""Valkey and Redis backend, single or cluster, through ``valkey-glide``.

The client multiplexes concurrent calls over one connection, so concurrent SETs form a pipeline. Hedged reads use a
second client as the second lane.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvsidecar.errors import ConfigurationError

from cache_daemon.remote.address import Credentials, RemoteAddress
from cache_daemon.remote.backend import Item, RemoteFailed, limited, translating_errors, value_limits
from cache_daemon.remote.certificates import tls_error_reason

# Callers' timeouts are shorter; the request timeout only ends abandoned requests.
_REQUEST_MS, _CONNECT_MS = 10_000, 1_000
_SCAN_COUNT = 1000
_VALUE = (bytes, type(None))
_MEANINGS = {
    "maxmemory": "the server is full",
    "oom": "the server is full",
    "readonly": "the server takes no writes",
    "noauth": "the server asks for a password",
    "wrongpass": "the server does not take the password",
    "permission": "the server's user may not do that",
    "clusterdown": "the cluster is down",
    "loading": "the server is starting",
    "misconf": "the server cannot write to its disk",
}


class RedisBackend:
    """A Valkey or Redis server. Raises ConfigurationError without its client."""

    name = "valkey"
    # Small, because the server copies a value in its only thread.
    part_bytes = 1 << 20
    lanes = 2

    def __init__(self, address: RemoteAddress, credentials: Credentials) -> None:
        try:
            import glide
        except ImportError as error:
            raise ConfigurationError(
                "the remote tier is a Valkey, but its client is not installed; pip install 'kvsidecar[valkey]'"
            ) from error
        self._glide: Any = glide
        # Errors reach the callers, so the client need not log.
        glide.Logger.set_logger_config(glide.LogLevel.OFF)
        self._address, self._credentials = address, credentials
        self._clients: list[Any] = []

    async def connect(self) -> None:
        await self.close()
        make = self._glide.GlideClusterClient if self._address.cluster else self._glide.GlideClient
        try:
            for _ in range(self.lanes):
                self._clients.append(await make.create(self._configuration()))
            await asyncio.gather(*(client.ping() for client in self._clients))
        except Exception as error:
            await self.close()
            raise RemoteFailed(_reason(error)) from error

    def _configuration(self) -> Any:
        glide, address = self._glide, self._address
        advanced = (
            glide.AdvancedGlideClusterClientConfiguration if address.cluster else glide.AdvancedGlideClientConfiguration
        )
        tls = glide.TlsAdvancedConfiguration(root_pem_cacerts=self._credentials.ca) if self._credentials.ca else None
        settings: dict[str, Any] = {
            "addresses": [glide.NodeAddress(host, port) for host, port in address.hosts],
            "use_tls": address.tls,
            "request_timeout": _REQUEST_MS,
            "client_name": "kvsidecar",
            # Otherwise the new client connects at once, and blocks the event loop until that succeeds or fails.
            "lazy_connect": True,
            "reconnect_strategy": glide.BackoffStrategy(num_of_retries=2, factor=100, exponent_base=2),
            "advanced_config": advanced(connection_timeout=_CONNECT_MS, tls_config=tls),
        }
        if self._credentials.secret:
            settings["credentials"] = glide.ServerCredentials(self._credentials.secret, address.user or None)
        if address.cluster:
            return glide.GlideClusterClientConfiguration(**settings)
        return glide.GlideClientConfiguration(**settings, database_id=address.database)

    async def get_many(self, names: Sequence[str], lane: int = 0, max_bytes: Sequence[int] = ()) -> list[bytes | None]:
        client, limits = self._client(lane), value_limits(names, max_bytes)
        if not names:
            return []
        reads: Any = (self._glide.ClusterBatch if self._address.cluster else self._glide.Batch)(is_atomic=False)
        for name, limit in zip(names, limits, strict=True):
            reads.getrange(name, 0, limit)  # MGET would transfer values of any length; GETRANGE: missing is empty
        with translating_errors(_reason):
            found = await client.exec(reads, raise_on_error=True)
        if not isinstance(found, list) or len(found) != len(names) or not all(isinstance(v, _VALUE) for v in found):
            raise RemoteFailed("its answer is not what was asked for")
        return [limited(value or None, limit) for value, limit in zip(found, limits, strict=True)]

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        client = self._client(0)
        expiry = None
        if ttl_seconds is not None:
            expiry = self._glide.ExpirySet(self._glide.ExpiryType.SEC, ttl_seconds)
        with translating_errors(_reason):
            await asyncio.gather(*(client.set(name, value, expiry=expiry) for name, value in items))

    async def put_if_absent(self, name: str, value: bytes) -> None:
        only = self._glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        with translating_errors(_reason):
            await self._client(0).set(name, value, conditional_set=only)

    async def delete_many(self, names: Sequence[str]) -> None:
        if names:
            with translating_errors(_reason):
                await self._client(0).unlink(list(names))

    async def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        client, match = self._client(0), f"{_escaped(prefix)}*"
        cursor: Any = self._glide.ClusterScanCursor() if self._address.cluster else b"0"
        while True:
            with translating_errors(_reason):
                cursor, found = await client.scan(cursor, match=match, count=_SCAN_COUNT)
            yield [text for text in map(_text, found) if text is not None]
            if cursor.is_finished() if self._address.cluster else cursor == b"0":
                return

    async def close(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            with contextlib.suppress(Exception):
                await client.close()

    def _client(self, lane: int) -> Any:
        if not self._clients:
            raise RemoteFailed("it is not connected")
        return self._clients[lane % len(self._clients)]


def _reason(error: Exception) -> str:
    """Describe an error in our own words, because the server's text may name keys."""
    text = str(error).lower()
    if why := tls_error_reason(text):
        return why
    for sign, meaning in _MEANINGS.items():
        if sign in text:
            return meaning
    return f"the client says {type(error).__name__}"


def _text(name: bytes) -> str | None:
    """Decode a name; None for a name that this program cannot have written.

    Another writer's keys must not prevent deletions.
    """
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def _escaped(prefix: str) -> str:
    """Escape a prefix for use in a pattern."""
    return "".join(f"\\{c}" if c in "*?[]\\^" else c for c in prefix)
