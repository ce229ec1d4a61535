"""Health probe of the backend: connects, retries while the circuit is open, measures latency.

It measures the latency while no request reads. So no request has to discover that the backend works again, or is fast
enough again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.circuit_breaker import CircuitState
from cache_daemon.remote.remote_tier import RemoteTier

# The backend must be in use within five seconds of its recovery: two probes, each with a connection.
_RETRY_SECONDS, _PROBE_TIMEOUT_SECONDS, _CONNECT_TIMEOUT_SECONDS = 0.5, 0.5, 1.5
# Age at which the latency is measured again; the measurement also shows that the backend works.
_LATENCY_MAX_AGE_SECONDS = 2.0

log = structlog.get_logger("cache_daemon")


class HealthProbe:
    """The probe of one tier. ``run`` continues until it is cancelled.

    ``has_to_write`` says whether this node waits to write. Otherwise the probe writes nothing, because the node may
    only have the right to read; the next write is then the trial.
    """

    def __init__(self, tier: RemoteTier, has_to_write: Callable[[], bool]) -> None:
        self._tier, self._has_to_write = tier, has_to_write
        self._connected = False
        self._is_reported_down = False  # the outage is logged

    async def run(self) -> None:
        tier = self._tier
        while True:
            if tier.reads.allows_calls and tier.writes.allows_calls:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_SECONDS):
                        await tier.demand.wait()
            tier.demand.clear()
            try:
                await self._probe()
            except Exception:
                log.exception("probing the remote tier failed, going on")
            if not (tier.reads.allows_calls and tier.writes.allows_calls):
                self._report_down()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _probe(self) -> None:
        tier = self._tier
        try:
            if not tier.reads.allows_calls:
                await self._reconnect()
                tier.reads.half_open()
            elif time.monotonic() - tier.latency.latency_measured_at > _LATENCY_MAX_AGE_SECONDS:
                await tier.probe_read(_PROBE_TIMEOUT_SECONDS)
                tier.reads.record_success()
        except RemoteFailed as error:
            self._connected = self._connected and tier.reads.allows_calls
            tier.counters.failures += 1
            tier.reads.record_failure(str(error))
            return
        if not tier.writes.allows_calls and tier.reads.allows_calls:
            try:
                if self._has_to_write():
                    await tier.probe_write(_PROBE_TIMEOUT_SECONDS)
            except RemoteFailed as error:
                tier.writes.record_failure(str(error))
                return
            tier.writes.half_open()
        if self._is_reported_down and tier.reads.state is not CircuitState.OPEN:
            self._is_reported_down = False
            log.info("the remote tier answers again", engine=tier.backend.name)

    async def _reconnect(self) -> None:
        """Probe over the existing connection or a new connection. Raises RemoteFailed."""
        tier = self._tier
        tier.latency.reset_latency()
        if self._connected:
            with contextlib.suppress(RemoteFailed):
                await tier.probe_read(_PROBE_TIMEOUT_SECONDS)
                return
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
                await tier.backend.connect()
        except TimeoutError as error:
            raise RemoteFailed("it cannot be connected to in time") from error
        await tier.probe_read(_PROBE_TIMEOUT_SECONDS)
        self._connected = True
        tier.backend_generation += 1

    def _report_down(self) -> None:
        """Log an outage once."""
        if not self._is_reported_down:
            self._is_reported_down = True
            breaker = self._tier.reads if not self._tier.reads.allows_calls else self._tier.writes
            what = "reading" if breaker is self._tier.reads else "writing"
            log.warning(
                "the remote tier fails; serving without it until it answers",
                engine=self._tier.backend.name, of=what, why=breaker.reason,
            )  # fmt: skip
