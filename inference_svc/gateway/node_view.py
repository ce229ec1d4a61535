"""Node status for the web page: workers, tiers, RPC statistics, cache usage per tenant."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from kvsidecar import __version__, keys
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import from_rpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.net.channel import aio_channel

from inference_svc.gateway.hit_ratio_history import STEP_SECONDS, HitRatioHistory
from inference_svc.gateway.tenant_usage import TenantCounts, TenantUsage, usage_entry
from inference_svc.gateway.worker_router import RECONNECT, Worker, WorkerRouter

_TIMEOUT_SECONDS = 2.0
_FRESH_SECONDS = 0.5
_SHOWN_CALLS = 6


class NodeView:
    """Status of workers and daemon. It contains no prompts, no tokens and no salts."""

    def __init__(self, router: WorkerRouter, cache_socket: Path | None) -> None:
        self._router, self._socket = router, cache_socket
        self._history = HitRatioHistory()
        self._channel: grpc.aio.Channel | None = None
        self._daemon: Any = None
        self._usage, self._counts = TenantUsage(), TenantCounts()
        self._sampler: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    @property
    def daemon(self) -> Any:
        """gRPC stub of the daemon; None without a daemon."""
        return self._daemon

    async def start(self) -> None:
        if self._socket is not None:
            self._channel = aio_channel(self._socket, options=RECONNECT)
            self._daemon = CacheServiceStub(self._channel)
        self._sampler = asyncio.create_task(self._sample())

    async def close(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _sample(self) -> None:
        while True:
            await self.stats()
            await asyncio.sleep(STEP_SECONDS)

    async def refresh(self) -> None:
        """Query the workers, unless the last query was a moment ago."""
        if time.monotonic() - self._asked_at > _FRESH_SECONDS:
            await self.stats()

    async def stats(self) -> list[pb.GetStatsResponse | None]:
        """Query each worker; None for a worker that does not answer."""
        self._asked_at = time.monotonic()
        found = await asyncio.gather(*(_stats_of(worker) for worker in self._router.workers))
        for worker, stats in zip(self._router.workers, found, strict=True):
            worker.stats = stats
            if stats is not None:
                self._history.observe(worker.target, stats, time.monotonic())
        return found

    async def show(self, salt: bytes, operator: bool) -> dict[str, Any]:
        """Return the status for an operator, or for a guest, who sees only the usage of its own ``salt``."""
        stats, cache = await asyncio.gather(self.stats(), self._cache(salt, operator))
        workers = zip(self._router.workers, stats, strict=True)
        return {
            "version": __version__,
            "operator": operator,
            "workers": [_worker(i, worker, found, operator) for i, (worker, found) in enumerate(workers)],
            "reuse": self._history.as_dict(),
            "cache": cache,
        }

    async def _cache(self, salt: bytes, operator: bool) -> dict[str, Any]:
        if self._daemon is None:
            return {"failing": "this gateway was not told where the cache daemon is"}
        try:
            return await (self._whole_cache(salt) if operator else self._own(salt))
        except grpc.RpcError as error:
            return {"failing": f"the cache daemon does not answer ({from_rpc(error)})"}

    async def _whole_cache(self, salt: bytes) -> dict[str, Any]:
        stats = await self._daemon.Stats(cache_pb2.StatsRequest(), timeout=_TIMEOUT_SECONDS)
        used = {s.namespace: "" for s in stats.session_details} | self._namespaces()
        names = {keys.tenant_root(namespace, b""): _tenant(b"", who) for namespace, who in used.items()}
        if salt:
            names |= {keys.tenant_root(namespace, salt): _tenant(salt, who) for namespace, who in used.items()}
        return {
            "failing": stats.durable_failing and f"nothing can be written to disk: {stats.durable_failing}",
            "uptime_seconds": stats.uptime_seconds,
            "tiers": [
                _tier("arena", stats.arena_used_bytes, stats.arena_bytes, stats.arena_chunks),
                _tier("disk", stats.durable_bytes, stats.durable_budget_bytes, stats.durable_chunks),
            ],
            "evictions": {"arena": stats.arena_evictions, "disk": stats.durable_evictions},
            "calls": [
                {"method": c.method, "count": c.count, "errors": c.errors, "p50_ms": c.p50_ms, "p99_ms": c.p99_ms}
                for c in stats.calls[:_SHOWN_CALLS]
            ],
            **await self._usage.of_all(self._daemon, names),
        }

    async def _own(self, salt: bytes) -> dict[str, Any]:
        """Return the usage of one salt, in the namespaces of the served models."""
        found = []
        for namespace, who in self._namespaces().items():
            stats = await self._counts.count(self._daemon, namespace, salt)
            root, name = keys.tenant_root(namespace, salt), _tenant(salt, who)
            used = stats.arena_used_bytes, stats.durable_bytes
            found.append(usage_entry(root, name, stats.chunks, stats.tokens, *used))
        return {"failing": "", "tenants": found, "complete": True}

    def _namespaces(self) -> dict[bytes, str]:
        """Return adapter names by namespace; a served model's own namespace has an empty name."""
        models = [w.model for w in self._router.workers if w.model.namespace]
        found = {m.namespace: "" for m in models}
        return found | {a.namespace: a.name for m in models for a in m.adapters}


def _tenant(salt: bytes, adapter: str) -> str:
    """Return the name under which the page shows a guest's own usage."""
    whose = "yours" if salt else "without a salt"
    return f"{whose}, {adapter}" if adapter else whose


async def _stats_of(worker: Worker) -> pb.GetStatsResponse | None:
    if worker.alive:
        with suppress(grpc.RpcError):
            stats: pb.GetStatsResponse = await worker.poll_client.stub.GetStats(
                pb.GetStatsRequest(), timeout=_TIMEOUT_SECONDS
            )
            return stats
    return None


def _worker(i: int, worker: Worker, stats: pb.GetStatsResponse | None, operator: bool) -> dict[str, Any]:
    up = stats is not None and worker.alive
    state = "ready" if up else "down" if worker.was_up else "starting"
    shown: dict[str, Any] = {"name": f"worker-{i}", "state": state, "model": worker.model.model_id}
    if stats is None:
        return shown
    shown["busy"] = stats.running + stats.waiting > 0
    shown["reuse_anywhere"] = stats.reuse_anywhere.sentence
    if not operator:
        return shown
    return shown | {
        "running": stats.running,
        "waiting": stats.waiting,
        "pool_tokens": stats.pool_pages * stats.page_tokens,
        "pool_used_tokens": (stats.pool_pages - stats.pool_free_pages) * stats.page_tokens,
        "cache_attached": stats.cache_attached,
        "requests": stats.requests,
    }


def _tier(name: str, used: int, budget: int, chunks: int) -> dict[str, Any]:
    return {"name": name, "used_bytes": used, "budget_bytes": budget, "chunks": chunks}
