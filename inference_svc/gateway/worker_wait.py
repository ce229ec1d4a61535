"""Delays requests while no worker is up and one restarts."""

from __future__ import annotations

import asyncio
import os
import time
from math import inf

from kvsidecar.errors import Unavailable
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.process.node_report import STARTING, read_reports
from starlette.datastructures import Headers

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.http_tracing import current_span
from inference_svc.gateway.worker_router import Worker, WorkerRouter

_MAX_WAITING, _POLL_SECONDS, _READ_SECONDS = 1024, 0.05, 0.5
# The gateway notices a started worker later than the supervisor does. On a busy machine, polls may time out before.
NOTICE_SECONDS = 10.0


class WorkerWait:
    """Picks workers; if all workers are down and one was up before, waits for a restart.

    A request waits for at most ``worker_wait_seconds``. While the supervisor reports that it is starting a worker, this
    time does not run, but for at most ``worker_start_seconds``. After a start, a request waits at least 10 s more, so
    that the gateway notices the worker. Runs on the event loop.
    """

    def __init__(self, router: WorkerRouter, config: GatewayConfig) -> None:
        self._router, self._config = router, config
        self._num_waiting = 0
        self._starting, self._read_at = False, float("-inf")

    async def pick(self, request: pb.GenerateRequest, excluded: set[str], max_seconds: float | None) -> Worker:
        """Return the router's choice, after a wait if necessary.

        After a wait, the method ignores ``excluded``, because a failed worker that is up again has restarted.
        ``max_seconds`` is the client's own limit. Raises Unavailable.
        """
        try:
            return self._router.pick(request, excluded)
        except Unavailable:
            if not self._router.was_up or self._num_waiting >= _MAX_WAITING or max_seconds == 0:
                raise
        began, waiting_since = time.perf_counter(), time.monotonic()
        waiting_until = waiting_since + self._config.worker_wait_seconds
        self._num_waiting += 1
        try:
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                try:
                    return self._router.pick(request, set())
                except Unavailable:
                    now = time.monotonic()
                    if self.is_starting() and now - waiting_since < self._config.worker_start_seconds:
                        waiting_until = now + max(self._config.worker_wait_seconds, NOTICE_SECONDS)
                    if now >= min(waiting_until, waiting_since + (max_seconds or inf)):
                        raise
        finally:
            self._num_waiting -= 1
            current_span().phase("wait for a worker", began, time.perf_counter())

    def is_starting(self) -> bool:
        """Return whether this process's supervisor reports that it is starting a worker.

        The method reads the reports at most every half second.
        """
        folder, now = self._config.supervisor_dir, time.monotonic()
        if folder is None:
            return False
        if now - self._read_at > _READ_SECONDS:
            self._read_at = now
            reports = read_reports(folder, os.getppid())
            self._starting = any(
                name.startswith("worker") and report.state == STARTING for name, report in reports.items()
            )
        return self._starting


def preferred_wait_seconds(headers: Headers) -> float | None:
    """Return the client's limit for waiting, from ``Prefer: wait=N`` (RFC 7240); None without the header."""
    for preference in ",".join(headers.getlist("prefer")).split(","):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip().lower() == "wait" and value.strip().strip('"').isdecimal():
            return float(value.strip().strip('"')[:9])
    return None
