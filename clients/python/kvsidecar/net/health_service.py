"""gRPC's health service, whose states never wait for a client."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

_WRITE_SECONDS = 10.0
_MAX_WATCHES = 1024


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of a server's services (``grpc.health.v1``), for one event loop.

    The servicer of grpcio-health-checking holds a lock while it writes to a watching client, and each change of the
    state needs that lock. So a client that takes no data would keep the old state, and delay the shutdown, for ever.
    """

    def __init__(self) -> None:
        self._states: dict[str, HealthCheckResponse.ServingStatus] = {"": HealthCheckResponse.SERVING}
        self._changed, self._ending = asyncio.Event(), False
        self._num_watches = 0

    async def Check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        """Return a service's state. Ends with NOT_FOUND for a service without one."""
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return HealthCheckResponse(status=state)

    async def Watch(self, request: HealthCheckRequest, context: Any) -> None:
        """Write a service's state, and each later one. Ends with a shutdown, or if the client takes nothing for 10 s.

        A client that is slow may miss states between two others. Ends with RESOURCE_EXHAUSTED beyond 1,024 watches.
        """
        if self._num_watches >= _MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"at most {_MAX_WATCHES} calls may watch at a time; use Check"
            )
        self._num_watches += 1
        try:
            await self._write_states(request, context)
        finally:
            self._num_watches -= 1

    async def _write_states(self, request: HealthCheckRequest, context: Any) -> None:
        sent = None
        while True:
            changed, ending = self._changed, self._ending
            state = self._states.get(request.service, HealthCheckResponse.SERVICE_UNKNOWN)
            if state != sent:
                try:
                    await asyncio.wait_for(context.write(HealthCheckResponse(status=state)), _WRITE_SECONDS)
                except TimeoutError:
                    await context.abort(
                        grpc.StatusCode.DEADLINE_EXCEEDED, f"the client took nothing for {_WRITE_SECONDS:g} s"
                    )
                sent = state
            if ending:
                return
            await changed.wait()

    async def set(self, service: str, state: HealthCheckResponse.ServingStatus) -> None:
        """Set a service's state. During a shutdown, all states stay NOT_SERVING."""
        if not self._ending:
            self._states[service] = state
            self._tell()

    async def enter_graceful_shutdown(self) -> None:
        """Set all states to NOT_SERVING for good; watching clients learn of it, and their calls end."""
        self._ending = True
        self._states = dict.fromkeys(self._states, HealthCheckResponse.NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
