"""Cache usage per tenant: chunks, tokens and bytes by tenant root."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb

_PAGE, _MAX_PAGES = 1000, 20
_FRESH_SECONDS, _TIMEOUT_SECONDS = 5.0, 5.0
_COUNT_SECONDS, _MAX_ROOTS = 2.0, 256
# The daemon counts a tenant's chunks on its event loop, one by one. The counts of one tenant may use at most this share
# of the daemon's time.
_MAX_DAEMON_SHARE = 0.05
_SHORT = 8


@dataclass
class _Usage:
    """Usage of one tenant in one namespace."""

    chunks: int = 0
    tokens: int = 0
    arena_bytes: int = 0
    disk_bytes: int = 0

    def add(self, chunk: pb.ChunkInfo) -> None:
        self.chunks += 1
        self.tokens += chunk.tokens
        self.arena_bytes += chunk.payload_bytes if chunk.resident else 0
        self.disk_bytes += chunk.stored_bytes if chunk.durable else 0


class TenantUsage:
    """Usage of all tenants, from a cached scan of the daemon's chunk list."""

    def __init__(self) -> None:
        self._sums: dict[bytes, _Usage] = {}
        self._complete = True
        self._walked = 0.0
        self._lock = asyncio.Lock()

    async def of_all(self, daemon: Any, names: dict[bytes, str]) -> dict[str, Any]:
        """Return the usage of all tenants, the largest first; scans again if the last scan is too old.

        ``complete`` is False if the daemon has more chunks than one scan covers. ``names`` maps a tenant root to the
        name that the page shows. Raises grpc.RpcError.
        """
        async with self._lock:
            if time.monotonic() - self._walked > _FRESH_SECONDS:
                await self._walk(daemon)
        found = [
            usage_entry(root, names.get(root, ""), s.chunks, s.tokens, s.arena_bytes, s.disk_bytes)
            for root, s in self._sums.items()
        ]
        found.sort(key=lambda one: -max(one["arena_bytes"], one["disk_bytes"]))
        return {"tenants": found, "complete": self._complete}

    async def _walk(self, daemon: Any) -> None:
        sums: dict[bytes, _Usage] = {}
        token = b""
        for _ in range(_MAX_PAGES):
            page = await daemon.List(pb.ListRequest(page_size=_PAGE, page_token=token), timeout=_TIMEOUT_SECONDS)
            for chunk in page.chunks:
                sums.setdefault(chunk.root, _Usage()).add(chunk)
            token = page.next_page_token
            if not token:
                break
        self._sums, self._complete, self._walked = sums, not token, time.monotonic()


@dataclass(eq=False)
class _Count:
    """A count of one tenant's chunks by the daemon, finished or in progress."""

    task: asyncio.Task[pb.StatsResponse | grpc.RpcError]
    began: float = field(default_factory=time.monotonic)
    fresh_until: float = float("inf")  # infinite during the count

    def ended(self, task: asyncio.Task[pb.StatsResponse | grpc.RpcError]) -> None:
        now = time.monotonic()
        counted = not task.cancelled() and isinstance(task.result(), pb.StatsResponse)
        self.fresh_until = now + max(_FRESH_SECONDS, (now - self.began) / _MAX_DAEMON_SHARE if counted else 0)


class TenantCounts:
    """Usage of single tenants, which the daemon counts on request.

    Callers share a count that is in progress, or that is recent enough. The counts of the most recently used tenant
    roots stay in memory.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, _Count] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    async def count(self, daemon: Any, namespace: bytes, salt: bytes) -> pb.StatsResponse:
        """Return one tenant's statistics. Raises grpc.RpcError."""
        root = keys.tenant_root(namespace, salt)
        count = self._counts.get(root)
        if count is None or time.monotonic() > count.fresh_until:
            request = pb.StatsRequest(namespace=namespace, tenant_salt=salt)
            count = self._counts[root] = _Count(asyncio.create_task(_counted(daemon, request)))
            count.task.add_done_callback(count.ended)
        self._counts.move_to_end(root)
        while len(self._counts) > _MAX_ROOTS:
            self._counts.popitem(last=False)
        found = await asyncio.shield(count.task)  # shielded, because other callers may wait for the same count
        if isinstance(found, grpc.RpcError):
            raise found
        return found


async def _counted(daemon: Any, request: pb.StatsRequest) -> pb.StatsResponse | grpc.RpcError:
    try:
        found: pb.StatsResponse = await daemon.Stats(request, timeout=_COUNT_SECONDS)
        return found
    except grpc.RpcError as error:
        return error


def usage_entry(root: bytes, name: str, chunks: int, tokens: int, arena_bytes: int, disk_bytes: int) -> dict[str, Any]:
    """Return one tenant's usage, identified by the first digits of the tenant root and never by the salt."""
    return {
        "tenant": root.hex()[:_SHORT],
        "name": name,
        "chunks": chunks,
        "tokens": tokens,
        "arena_bytes": arena_bytes,
        "disk_bytes": disk_bytes,
    }
