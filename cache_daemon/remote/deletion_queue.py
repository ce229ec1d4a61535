"""Deletions that a remote tier has not done yet: each once, in order, and not more of them than a limit."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvsidecar.errors import LimitExceeded

# Of one tenant, and of all. A tenant's own deletion counts once, whatever waits of its chunks.
MOST_OF_A_TENANT, MOST = 256, 16384


@dataclass(eq=False)
class Deletion:
    """Of a chunk with what continues it, without ``key`` of a tenant, without ``root`` of everything. ``known`` says
    that this node has the chunk, so that what continues it may be there even if it is not."""

    root: bytes
    key: bytes
    known: bool
    done: asyncio.Future[int]
    began: bool = False
    mark: bytes = b""  # of a tenant or everything: to be written, or perhaps written already
    voided: int = -1  # the generation of an engine in which nothing of it is believed any more, only to be removed
    again: asyncio.Future[int] | None = None  # asked for once more after it began


class Deletions:
    """Not thread-safe; on one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[bytes, bytes], Deletion] = OrderedDict()
        self._roots: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def concern(self, root: bytes) -> bool:
        """Whether something of a tenant is to be deleted."""
        return root in self._roots or b"" in self._roots

    def check(self, root: bytes, key: bytes) -> None:
        """Raises LimitExceeded when one more would be too many."""
        if (root, key) in self._waiting:
            return
        if key and self._roots[root] >= MOST_OF_A_TENANT:
            raise LimitExceeded(
                f"{MOST_OF_A_TENANT} deletions of this tenant wait for the remote tier, the most that may; delete all "
                "of the tenant, or try again when it has done them"
            )
        if len(self._waiting) >= MOST and (root or key):
            raise LimitExceeded(
                f"{MOST} deletions wait for the remote tier, the most that may; try again when it has done some"
            )

    def add(self, root: bytes, key: bytes, known: bool) -> Deletion:
        """Returns the one to wait for, which may have been there."""
        old = self._waiting.get((root, key))
        if old is not None:
            old.known = old.known or known
            if old.began and old.again is None:
                old.again = asyncio.get_running_loop().create_future()
            return old
        new = self._waiting[root, key] = Deletion(root, key, known, asyncio.get_running_loop().create_future())
        self._roots[root] += 1
        return new

    def first(self) -> Deletion:
        """The next one, which begins now."""
        found = next(iter(self._waiting.values()))
        found.began = True
        return found

    def finished(self, deletion: Deletion, gone: int) -> bool:
        """Returns whether that was all: who asked while it ran is not served by it."""
        if not deletion.done.done():
            deletion.done.set_result(gone)
        if deletion.again is not None:
            deletion.done, deletion.again = deletion.again, None
            deletion.began, deletion.voided = False, -1
            self._waiting.move_to_end((deletion.root, deletion.key))
            return False
        del self._waiting[deletion.root, deletion.key]
        self._roots[deletion.root] -= 1
        if not self._roots[deletion.root]:
            del self._roots[deletion.root]
        return True
