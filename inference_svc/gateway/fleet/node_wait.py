"""Waiting for nodes of a fleet that are starting their workers."""

from __future__ import annotations

import asyncio
from math import inf

from inference_svc.gateway.fleet.discovery import Members
from inference_svc.gateway.fleet.prefix_query import Asked

_MAX_WAITING, _LOOK_SECONDS = 1024, 0.25


class NodeWait:
    """Lets requests wait while nodes that could answer them say that they are starting a worker.

    For ``max_seconds`` at most, or less where the client wants that. Runs on the event loop.
    """

    def __init__(self, members: Members, max_seconds: float) -> None:
        self._members, self._max_seconds = members, max_seconds
        self._num_waiting = 0

    def goes_on(self, asked: Asked, since: float) -> bool:
        """Whether a request that waits since that time of the loop waits any longer."""
        waited = asyncio.get_running_loop().time() - since
        patience = min(self._max_seconds, inf if asked.wait_seconds is None else asked.wait_seconds)
        return waited < patience and self._num_waiting < _MAX_WAITING and self._is_starting(asked)

    async def pause(self) -> None:
        """Waits for a moment."""
        self._num_waiting += 1
        try:
            await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._num_waiting -= 1

    def _is_starting(self, asked: Asked) -> bool:
        """A node that was never up may serve any model."""
        return any(
            node.starting and (not asked.model or not node.models or asked.model in node.models)
            for node in self._members.all
        )
