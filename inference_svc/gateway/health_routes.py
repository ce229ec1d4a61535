"""Health endpoints: liveness at ``/livez``; readiness at ``/readyz``, ``/health`` and SageMaker's ``/ping``.

During a shutdown, ``DrainMiddleware`` answers the readiness probes with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

LIVEZ, READYZ, HEALTH, PING = "/livez", "/readyz", "/health", "/ping"
HEALTH_PATHS = frozenset({LIVEZ, READYZ, HEALTH, PING})


class Member(Protocol):
    """A worker of a node, or a node of a fleet; the readiness probe counts those that are up."""

    @property
    def alive(self) -> bool: ...


def add_liveness(app: FastAPI) -> None:
    """Serve the liveness probe, which always succeeds."""

    @app.get(LIVEZ)
    async def live() -> JSONResponse:
        return JSONResponse({"status": "ok"})


def add_readiness(app: FastAPI, kind: str, members: Callable[[], Collection[Member]]) -> None:
    """Serve the readiness probe: 200 if a member is up, otherwise 503. ``kind`` is ``worker`` or ``node``."""

    async def ready(_: Request) -> JSONResponse:
        known = members()
        up = sum(member.alive for member in known)
        body = {"status": "ok" if up else f"no {kind} is up", f"{kind}s_up": up, f"{kind}s": len(known)}
        return JSONResponse(body, status_code=200 if up else 503)

    for path in (HEALTH, READYZ, PING):
        app.add_api_route(path, ready, methods=["GET"])
