"""Remote backend interface: named byte strings that nodes share, and that may fail.

A backend may lose or corrupt values, so the tier above verifies every value that it reads. Calls have no timeout:
callers cancel calls that take too long, and ignore their results.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

Item = tuple[str, bytes | memoryview]


# Default length limit of a value, and the substitute for a longer value (no valid value is empty).
MAX_VALUE_BYTES, OVERSIZE = 64 << 20, b""


class RemoteFailed(Exception):
    """The backend failed. The text contains no secret, no key and no value."""


class RemoteBusy(RemoteFailed):
    """The circuit breaker did not send the call: after a failure it admits only a few calls at a time."""


@contextmanager
def translating_errors(reason: Callable[[Exception], str]) -> Iterator[None]:
    """Translate a client's errors into RemoteFailed, with their ``reason``."""
    try:
        yield
    except RemoteFailed:
        raise
    except Exception as error:
        raise RemoteFailed(reason(error)) from error


def value_limits(names: Sequence[str], max_bytes: Sequence[int]) -> Sequence[int]:
    """Return the length limit of each name's value."""
    return max_bytes or [MAX_VALUE_BYTES] * len(names)


def limited(value: bytes | None, max_bytes: int) -> bytes | None:
    """Return a value as ``get_many`` does: OVERSIZE if it is too long."""
    return OVERSIZE if value is not None and len(value) > max_bytes else value


class RemoteBackend(Protocol):
    """A client of Valkey, S3 or Azure. Call ``connect`` first, and again after a failure.

    ``part_bytes`` is the largest sensible value. ``lanes`` is the number of independent connections for reading: a read
    that is slow on one connection may be repeated on another.
    """

    name: str
    part_bytes: int
    lanes: int

    async def connect(self) -> None:
        """Open new connections, regardless of the state of earlier connections. Raises RemoteFailed."""
        ...

    async def get_many(self, names: Sequence[str], lane: int = 0, max_bytes: Sequence[int] = ()) -> list[bytes | None]:
        """Return values in the order of their names, None for missing values. Raises RemoteFailed.

        ``max_bytes`` are the maximal lengths of the values, by default ``MAX_VALUE_BYTES``. A longer value, which
        another program may have written, is not transferred and returned as ``OVERSIZE``. An empty value may count as
        missing.
        """
        ...

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        """Store values, concurrently and in any order.

        A backend without a TTL ignores ``ttl_seconds``. Raises RemoteFailed; some of the values may then be stored.
        """
        ...

    async def put_if_absent(self, name: str, value: bytes) -> None:
        """Store a value without expiry unless the name exists. Raises RemoteFailed.

        If several callers do so at once, one value is stored.
        """
        ...

    async def delete_many(self, names: Sequence[str]) -> None:
        """Delete values; unknown names are ignored. Raises RemoteFailed."""
        ...

    def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yield pages of all names with a prefix. Raises RemoteFailed.

        Names that are added or deleted during the scan may be missing or repeated.
        """
        ...

    async def close(self) -> None:
        """Close all connections. Raises nothing."""
        ...
