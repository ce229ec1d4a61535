"""What a remote engine is: a store of byte strings by name, that many nodes share and that may fail at any time.

An engine promises little, and the tier above believes less: every value is checked when it is read. Calls have no
deadline of their own; who calls them cancels them, after which nothing of the call matters any more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

Item = tuple[str, bytes | memoryview]


class RemoteFailed(Exception):
    """The engine did not do what it was asked. The text has no secret, no key and no value."""


class RemoteBusy(RemoteFailed):
    """The engine was not asked: it is being tried after a failure, by few calls at a time."""


@contextmanager
def translating_errors(reason: Callable[[Exception], str]) -> Iterator[None]:
    """Turns a client's errors into ours, for their ``reason``."""
    try:
        yield
    except RemoteFailed:
        raise
    except Exception as error:
        raise RemoteFailed(reason(error)) from error


class RemoteBackend(Protocol):
    """See the module. ``connect`` comes first, and may come again after a failure.

    ``part_bytes`` is how large a value may well be, ``lanes`` how many independent connections there are for reading:
    a read that is slow on one may be tried on another.
    """

    name: str
    part_bytes: int
    lanes: int

    async def connect(self) -> None:
        """Opens connections anew, whatever became of earlier ones. Raises RemoteFailed."""
        ...

    async def get_many(self, names: Sequence[str], lane: int = 0) -> list[bytes | None]:
        """Values in the order of their names, None where there is none. Raises RemoteFailed."""
        ...

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        """Stores values, at once and in any order. An engine without times to live ignores ``ttl_seconds``. Raises
        RemoteFailed, with some of them stored."""
        ...

    async def put_if_absent(self, name: str, value: bytes) -> None:
        """Stores a value that never ends, unless the name has one: of several callers one wins. Raises RemoteFailed."""
        ...

    async def delete_many(self, names: Sequence[str]) -> None:
        """Unknown names are ignored. Raises RemoteFailed."""
        ...

    def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        """All names with a prefix, some at a time; those that come or go meanwhile may be missing or named twice.
        Raises RemoteFailed."""
        ...

    async def close(self) -> None:
        """Ends all connections. Raises nothing."""
        ...
