"""Keeps an eye on the engine: connects, tries again while the circuit is open, and measures while nothing is read.

So no request pays for finding out that the engine is back, or that it has become fast enough again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import structlog

from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.circuit_breaker import Circuit
from cache_daemon.remote.remote_tier import RemoteTier

# Within five seconds of the engine's return it must be in use: two tries, each with its connection.
_AGAIN_SECONDS, _TRY_SECONDS, _CONNECT_SECONDS = 0.5, 0.5, 1.5
# What was measured is good for so long; then it is measured again, which also shows that the engine is there.
_FRESH_SECONDS = 2.0

log = structlog.get_logger("cache_daemon")


class Watch:
    """Of one tier. ``run`` goes on until it is cancelled."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier
        self._connected = False
        self._told = False  # that it is away

    async def run(self) -> None:
        tier = self._tier
        while True:
            if tier.reads.allows and tier.writes.allows:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_SECONDS):
                        await tier.asked.wait()
            tier.asked.clear()
            try:
                await self._look()
            except Exception:
                log.exception("watching the remote tier failed, going on")
            if not (tier.reads.allows and tier.writes.allows):
                self._tell()
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _look(self) -> None:
        tier = self._tier
        try:
            if not tier.reads.allows:
                await self._reach()
                tier.reads.answered()
            elif time.monotonic() - tier.figures.looked_at > _FRESH_SECONDS:
                await tier.try_reading(_TRY_SECONDS)
                tier.reads.succeeded()
        except RemoteFailed as error:
            self._connected = self._connected and tier.reads.allows
            tier.counts.failures += 1
            tier.reads.failed(str(error))
            return
        if not tier.writes.allows and tier.reads.allows:
            try:
                await tier.try_writing(_TRY_SECONDS)
            except RemoteFailed as error:
                tier.writes.failed(str(error))
                return
            tier.writes.answered()
        if self._told and tier.reads.state is not Circuit.OPEN:
            self._told = False
            log.info("the remote tier answers again", engine=tier.engine.name)

    async def _reach(self) -> None:
        """Over the connection that there is, or a new one. Raises RemoteFailed."""
        tier = self._tier
        tier.figures.forget()
        if self._connected:
            with contextlib.suppress(RemoteFailed):
                await tier.try_reading(_TRY_SECONDS)
                return
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await tier.engine.connect()
        except TimeoutError as error:
            raise RemoteFailed("it cannot be connected to in time") from error
        await tier.try_reading(_TRY_SECONDS)
        self._connected = True
        tier.generation += 1

    def _tell(self) -> None:
        """Logs once that the engine is away."""
        if not self._told:
            self._told = True
            breaker = self._tier.reads if not self._tier.reads.allows else self._tier.writes
            what = "reading" if breaker is self._tier.reads else "writing"
            log.warning(
                "the remote tier fails; serving without it until it answers",
                engine=self._tier.engine.name, of=what, why=breaker.why,
            )  # fmt: skip
