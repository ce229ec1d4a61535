"""Remote backend interface: byte strings by name, shared by nodes, that may fail at any time.

A backend promises little, and the tier above trusts less: every value is verified when it is read. Calls have no
timeout of their own; callers cancel them, after which the result of the call does not matter any more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

Item = tuple[str, bytes | memoryview]


class RemoteFailed(Exception):
    """The backend did not do what it was asked. The text has no secret, no key and no value."""


class RemoteBusy(RemoteFailed):
    """The backend was not asked: it is on trial after a failure, with few calls at a time."""


@contextmanager
def translating_errors(reason: Callable[[Exception], str]) -> Iterator[None]:
    """Translate a client's errors into RemoteFailed, with their ``reason``."""
    try:
        yield
    except RemoteFailed:
        raise
    except Exception as error:
        raise RemoteFailed(reason(error)) from error


class RemoteBackend(Protocol):
    """A client of Valkey, S3 or Azure. ``connect`` comes first, and may come again after a failure.

    ``part_bytes`` is the largest sensible value, ``lanes`` the number of independent connections for reading: a read
    that is slow on one may be tried on another.
    """

    name: str
    part_bytes: int
    lanes: int

    async def connect(self) -> None:
        """Open new connections, whatever became of earlier ones. Raises RemoteFailed."""
        ...

    async def get_many(self, names: Sequence[str], lane: int = 0) -> list[bytes | None]:
        """Return values in the order of their names, None for missing ones. Raises RemoteFailed."""
        ...

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        """Store values, concurrently and in any order.

        A backend without a TTL ignores ``ttl_seconds``. Raises RemoteFailed, with some of them stored.
        """
        ...

    async def put_if_absent(self, name: str, value: bytes) -> None:
        """Store a value without expiry unless the name has one: of several callers one wins. Raises RemoteFailed."""
        ...

    async def delete_many(self, names: Sequence[str]) -> None:
        """Delete values; unknown names are ignored. Raises RemoteFailed."""
        ...

    def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yield pages of all names with a prefix; those that come or go meanwhile may be missing or repeated.

        Raises RemoteFailed.
        """
        ...

    async def close(self) -> None:
        """Close all connections. Raises nothing."""
        ...
