"""Delays requests while the nodes of a fleet start their workers."""

from __future__ import annotations

import asyncio
from math import inf

from inference_svc.gateway.fleet.node_discovery import NodeDiscovery
from inference_svc.gateway.fleet.prefix_query import RoutedRequest
from inference_svc.gateway.model_aliases import lists

_MAX_WAITING, _POLL_SECONDS = 1024, 0.25


class NodeWait:
    """Decides whether a request waits for a node that reports that it is starting a worker.

    A request waits for at most ``max_seconds``, or less if the client set a lower limit. Runs on the event loop.
    """

    def __init__(self, discovery: NodeDiscovery, max_seconds: float) -> None:
        self._discovery, self._max_seconds = discovery, max_seconds
        self._num_waiting = 0

    def should_wait(self, request: RoutedRequest, since: float) -> bool:
        """Return whether a request should wait longer; ``since`` is the loop time at which its wait began."""
        waited = asyncio.get_running_loop().time() - since
        patience = min(self._max_seconds, inf if request.wait_seconds is None else request.wait_seconds)
        return waited < patience and self._num_waiting < _MAX_WAITING and self._is_starting(request)

    async def pause(self) -> None:
        """Wait for one poll interval."""
        self._num_waiting += 1
        try:
            await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._num_waiting -= 1

    def _is_starting(self, request: RoutedRequest) -> bool:
        """Return whether a node that may serve the request is starting a worker.

        The models of a node that was never up are unknown, so such a node counts for every model.
        """
        return any(
            node.starting and (not request.model or not node.models or lists(node.models, request.model))
            for node in self._discovery.all
        )
