"""Health by tier: service names ``durable`` and ``remote`` of grpc.health, and the overall state.

``durable`` is SERVING while the durable tier can be written, and ``remote`` while the remote tier is used. The overall
state stays SERVING while a tier fails, since workers lose nothing. It is NOT_SERVING while at least half of the calls
of one method end INTERNAL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import structlog
from grpc_health.v1 import health_pb2
from kvsidecar.process.background_task import BackgroundTask

DURABLE, REMOTE, OVERALL = "durable", "remote", "overall"
_FAILS = {
    DURABLE: "the durable tier cannot be written to",
    REMOTE: "the remote tier is away",
    OVERALL: "calls fail inside the daemon",
}
_WORKS = {
    DURABLE: "the durable tier can be written to again",
    REMOTE: "the remote tier is used again",
    OVERALL: "calls succeed again",
}
GRACE_SECONDS = 10.0
_STEP_SECONDS = 0.5

SetHealth = Callable[[str, int], Awaitable[None]]
Failing = Callable[[], tuple[str, float] | None]
log = structlog.get_logger("cache_daemon")


@asynccontextmanager
async def report_health(
    name: str, failing: Failing | None, set_health: SetHealth, grace_seconds: float = GRACE_SECONDS
) -> AsyncIterator[None]:
    """Keep the health of a service name up to date while the ``with`` block runs.

    ``failing`` returns the reason and the start of a failure (monotonic seconds), or None. Pass None for a daemon
    without that tier: the name stays unknown.
    """
    if failing is None:
        yield
        return
    await set_health(name, health_pb2.HealthCheckResponse.SERVING)
    async with BackgroundTask(partial(_report, name, failing, set_health, grace_seconds)):
        yield


async def _report(name: str, failing: Failing, set_health: SetHealth, grace_seconds: float) -> None:
    serving = True
    while True:
        await asyncio.sleep(_STEP_SECONDS)
        found = failing()
        sound = found is None or time.monotonic() - found[1] <= grace_seconds
        if sound == serving:
            continue
        serving = sound
        response = health_pb2.HealthCheckResponse
        await set_health(name, response.SERVING if sound else response.NOT_SERVING)
        if found is not None and not sound:
            log.error(_FAILS[name], why=found[0], since_seconds=int(grace_seconds))
        else:
            log.info(_WORKS[name])
