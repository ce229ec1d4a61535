"""Deletions that a remote tier has not done yet: each once, in order, and not more of them than a limit."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvsidecar.errors import LimitExceeded

# Of one tenant, and of all. A tenant's own deletion counts once, whatever waits of its chunks.
MAX_PER_TENANT, MAX_DELETIONS = 256, 16384


@dataclass(eq=False)
class PendingDeletion:
    """Of a chunk with what continues it, without ``key`` of a tenant, without ``root`` of everything. ``known`` says
    that this node has the chunk, so that what continues it may be there even if it is not."""

    root: bytes
    key: bytes
    is_known: bool
    done: asyncio.Future[int]
    started: bool = False
    epoch: bytes = b""  # of a tenant or everything: to be written, or perhaps written already
    bumped_generation: int = (
        -1
    )  # the generation of an engine in which nothing of it is believed any more, only to be removed
    repeat: asyncio.Future[int] | None = None  # asked for once more after it began


class DeletionQueue:
    """Not thread-safe; on one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[bytes, bytes], PendingDeletion] = OrderedDict()
        self._roots: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def concerns(self, root: bytes) -> bool:
        """Whether something of a tenant is to be deleted."""
        return root in self._roots or b"" in self._roots

    def check(self, root: bytes, key: bytes) -> None:
        """Raises LimitExceeded when one more would be too many."""
        if (root, key) in self._waiting:
            return
        if key and self._roots[root] >= MAX_PER_TENANT:
            raise LimitExceeded(
                f"{MAX_PER_TENANT} deletions of this tenant wait for the remote tier, the most that may; delete all "
                "of the tenant, or try again when it has done them"
            )
        if len(self._waiting) >= MAX_DELETIONS and (root or key):
            raise LimitExceeded(
                f"{MAX_DELETIONS} deletions wait for the remote tier, the most that may; try again when it has done "
                "some"
            )

    def add(self, root: bytes, key: bytes, known: bool) -> PendingDeletion:
        """Returns the one to wait for, which may have been there."""
        old = self._waiting.get((root, key))
        if old is not None:
            old.is_known = old.is_known or known
            if old.started and old.repeat is None:
                old.repeat = asyncio.get_running_loop().create_future()
            return old
        new = self._waiting[root, key] = PendingDeletion(root, key, known, asyncio.get_running_loop().create_future())
        self._roots[root] += 1
        return new

    def first(self) -> PendingDeletion:
        """The next one, which begins now."""
        found = next(iter(self._waiting.values()))
        found.started = True
        return found

    def finish(self, deletion: PendingDeletion, gone: int) -> bool:
        """Returns whether that was all: who asked while it ran is not served by it."""
        if not deletion.done.done():
            deletion.done.set_result(gone)
        if deletion.repeat is not None:
            deletion.done, deletion.repeat = deletion.repeat, None
            deletion.started, deletion.bumped_generation = False, -1
            self._waiting.move_to_end((deletion.root, deletion.key))
            return False
        del self._waiting[deletion.root, deletion.key]
        self._roots[deletion.root] -= 1
        if not self._roots[deletion.root]:
            del self._roots[deletion.root]
        return True
