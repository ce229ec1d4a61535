"""Payloads on their way from a remote tier: bounded in number for all prompts together, until they are placed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cache_daemon.remote.remote_record import RemoteRecord
from cache_daemon.remote.remote_tier import RemoteTier

# Groups that are on their way, or here and not placed; and what each has before it is taken for failed.
_MAX_DOWNLOADS, _STALLED_SECONDS = 8, 5.0

T = TypeVar("T")


@dataclass(eq=False)
class Download:
    """A group of entries whose payloads are asked for."""

    group: list[RemoteRecord]
    inserted: asyncio.Event = field(default_factory=asyncio.Event)  # set by who has used the payloads
    _payloads: list[list[bytes] | None] | None = None
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, tier: RemoteTier, room: asyncio.Semaphore) -> None:
        """Keeps its place in the room until the payloads are placed. Raises RemoteFailed."""
        async with room:
            try:
                self._payloads = await tier.read_payloads(self.group, _STALLED_SECONDS)
            finally:
                self._done.set()
            await self.inserted.wait()

    async def wait_payloads(self, seconds: float) -> list[list[bytes] | None] | None:
        """The payloads, which are the caller's alone from then on; None when they did not come in time, or failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._done.wait()
        payloads, self._payloads = self._payloads, None
        return payloads


class Downloads:
    """Of one tier."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier, self._slots = tier, asyncio.Semaphore(_MAX_DOWNLOADS)

    @contextmanager
    def start(self, groups: Sequence[list[RemoteRecord]]) -> Iterator[list[Download]]:
        """Downloads groups, in their order; what is left at the end is given up.

        Places are given in the order asked for: so the group that is to be placed next has one, or gets one before
        those behind it, and prompts do not wait for each other for ever.
        """
        downloads = [Download(group) for group in groups]
        tasks = [asyncio.create_task(one.run(self._tier, self._slots)) for one in downloads]
        try:
            yield downloads
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(consume_exception)


async def await_uninterruptible(work: Awaitable[T]) -> T:
    """Awaits what cannot be stopped, as one: a cancellation is raised when it has ended."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        consume_exception(running)
        raise cancelled
    return running.result()


def consume_exception(task: asyncio.Future[Any]) -> None:
    """What became of something that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
