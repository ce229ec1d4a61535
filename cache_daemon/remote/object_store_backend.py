"""Object store backends, through ``obstore``: S3 and compatible stores, and Azure Blob Storage.

Credentials are those of ``--remote``; without them, those of the AWS or AZURE variables, files and services.
Objects have no TTL: readers ignore expired records, and the store's lifecycle rules remove them.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvsidecar.errors import ConfigurationError

from cache_daemon.remote.address import Credentials, RemoteAddress
from cache_daemon.remote.backend import OVERSIZE, Item, RemoteFailed, limited, translating_errors, value_limits
from cache_daemon.remote.certificates import tls_error_reason

_MAX_CONCURRENT_CALLS = 64
_LIST_PAGE_SIZE = 1000


class ObjectStoreBackend(ABC):
    """An object store. Raises ConfigurationError without its client, or for refused settings."""

    name: str
    part_bytes = 8 << 20
    lanes = 2

    def __init__(self, address: RemoteAddress, credentials: Credentials) -> None:
        try:
            import obstore
        except ImportError as error:
            raise ConfigurationError(
                f"the remote tier is a store of objects, but its client is not installed; "
                f"pip install 'kvsidecar[{self.name}]'"
            ) from error
        self._obstore: Any = obstore
        self._missing: Any = (obstore.exceptions.NotFoundError, FileNotFoundError)
        self._address, self._credentials = address, credentials
        self._stores: list[Any] = []
        self._call_slots = asyncio.Semaphore(_MAX_CONCURRENT_CALLS)

    async def connect(self) -> None:
        options: dict[str, Any] = {"allow_http": not self._address.tls, "connect_timeout": "1s", "timeout": "30s"}
        if self._credentials.ca:
            options["root_certificate"] = self._credentials.ca
        # Callers have timeouts and do their own retries.
        retries: Any = {"max_retries": 0}
        try:
            self._stores = [self._new(client_options=options, retry_config=retries) for _ in range(self.lanes)]
        except Exception as error:
            raise RemoteFailed(f"the client says {type(error).__name__}") from error

    @abstractmethod
    def _new(self, **options: Any) -> Any:
        """Create a client of the store."""

    async def get_many(self, names: Sequence[str], lane: int = 0, max_bytes: Sequence[int] = ()) -> list[bytes | None]:
        store, limits = self._store(lane), value_limits(names, max_bytes)
        return list(
            await asyncio.gather(*(self._get(store, name, limit) for name, limit in zip(names, limits, strict=True)))
        )

    async def _get(self, store: Any, name: str, max_bytes: int) -> bytes | None:
        async with self._call_slots:
            with translating_errors(_reason), contextlib.suppress(*self._missing):
                answer = await self._obstore.get_async(store, name)
                if answer.meta["size"] > max_bytes:
                    return OVERSIZE
                return limited(bytes(await answer.bytes_async()), max_bytes)
            return None

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        store = self._store(0)

        async def put(name: str, value: bytes | memoryview) -> None:
            async with self._call_slots:
                await self._obstore.put_async(store, name, bytes(value), use_multipart=False)

        with translating_errors(_reason):
            await asyncio.gather(*(put(name, value) for name, value in items))

    async def put_if_absent(self, name: str, value: bytes) -> None:
        with (
            translating_errors(_reason),
            contextlib.suppress(self._obstore.exceptions.AlreadyExistsError, FileExistsError),
        ):
            await self._obstore.put_async(self._store(0), name, value, mode="create", use_multipart=False)

    async def delete_many(self, names: Sequence[str]) -> None:
        if not names:
            return
        store = self._store(0)
        with translating_errors(_reason):
            try:
                await self._obstore.delete_async(store, list(names))
            except self._missing:
                # The client's bulk call stops at the first missing object, before it has deleted the others.
                await asyncio.gather(*(self._delete(store, name) for name in names))

    async def _delete(self, store: Any, name: str) -> None:
        async with self._call_slots:
            with contextlib.suppress(*self._missing):
                await self._obstore.delete_async(store, name)

    async def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        pages = self._obstore.list(self._store(0), prefix.rstrip("/"), chunk_size=_LIST_PAGE_SIZE)
        while True:
            with translating_errors(_reason):
                page = await anext(pages, None)
            if page is None:
                return
            yield [str(item["path"]) for item in page]

    async def close(self) -> None:
        self._stores = []

    def _store(self, lane: int) -> Any:
        if not self._stores:
            raise RemoteFailed("it is not connected")
        return self._stores[lane % len(self._stores)]


class S3Backend(ObjectStoreBackend):
    """A bucket of S3 or of a compatible store."""

    name = "s3"

    def _new(self, **options: Any) -> Any:
        from obstore.store import S3Store

        address, secret = self._address, self._credentials.secret
        given = {
            "region": address.region,
            "endpoint": address.endpoint,
            "access_key_id": address.user,
            "secret_access_key": secret,
        }
        return S3Store(address.bucket, config=_set(given), **options)


class AzureBackend(ObjectStoreBackend):
    """A container of Azure Blob Storage; the account key is base64."""

    name = "azure"

    def _new(self, **options: Any) -> Any:
        from obstore.store import AzureStore

        address, secret = self._address, self._credentials.secret
        given = {"account_name": address.user, "account_key": secret, "endpoint": address.endpoint}
        return AzureStore(address.bucket, config=_set(given), **options)


def _set(given: dict[str, str]) -> Any:
    return {name: value for name, value in given.items() if value}


def _reason(error: Exception) -> str:
    """Describe an error without the store's text, which names objects and may quote headers."""
    text = str(error)
    if why := tls_error_reason(text):
        return why
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return "the store does not take the key, or its owner may not do that"
    for sign, meaning in (
        ("HTTP request to an HTTPS server", "it speaks TLS; write its endpoint with https://"),
        ("NoSuchBucket", "there is no such bucket"),
        ("ContainerNotFound", "there is no such container"),
        ("SlowDown", "the store says that it is asked too much"),
        ("status code: 507", "the store is full"),  # the number alone may be part of a name or a time
        ("token request", "no key is given, and this machine has none for the store; see --remote-secret-file"),
        ("kind: Connect", "it cannot be connected to"),
    ):
        if sign in text:
            return meaning
    return f"the client says {type(error).__name__}"
