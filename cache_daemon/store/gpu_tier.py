"""GPU tier: copies of hot chunks in GPU memory, for workers on that GPU.

A chunk with a copy is in the arena, too, and the copy ends when the chunk leaves the arena. So a lost GPU costs no
chunk, and workers on other devices read the arena.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from kvsidecar.cache.v1.cache_pb2 import StatsResponse

from cache_daemon.eviction.eviction_policy import EvictionPolicy
from cache_daemon.memory.arena import Slot, footprint
from cache_daemon.memory.gpu_arena import GpuArena
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.prefix_index import MatchedChunk
from cache_daemon.store.store_threads import StoreThreads
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.tier_quotas import TierQuotas

# Chunks that wait for a copy; later ones are copied after their next use.
_MAX_WAITING = 4096
# Copies on a thread at a time, after which the event loop places the next ones.
_BATCH_BYTES, _BATCH_CHUNKS = 16 << 20, 64
# One copy replaces at most this many others; then no free range may be long enough.
_MAX_REPLACED = 16

log = structlog.get_logger("cache_daemon")


class GpuTier:
    """Copies chunks to GPU memory after a use. Runs on the event loop.

    When the memory is full, the eviction policy decides: a copy of a less valuable chunk is dropped, or there is no new
    copy. Copies of leased chunks stay, since workers may read them.
    """

    def __init__(
        self, tiers: TierManager, arena: GpuArena, new_policy: Callable[[], EvictionPolicy], threads: StoreThreads
    ) -> None:
        self.arena, self.failed = arena, False
        self._tiers, self._threads = tiers, threads
        self._quotas = TierQuotas(new_policy, lambda _: None)  # no tenant has a quota of this memory
        self._waiting: deque[Chunk] = deque()
        self._copied: set[Chunk] = set()  # chunks with a slot here, also while they are copied
        self._task: asyncio.Task[None] | None = None
        tiers.gpu_quotas = self._quotas
        tiers.on_slot_freed.append(self._drop)

    def record_match(self, found: Sequence[MatchedChunk]) -> None:
        """Count what a worker on this GPU finds here, and have the other chunks copied, parents first."""
        if self.failed:
            return
        for chunk, tokens in found:
            if chunk.readable_gpu_slot is not None:
                self._tiers.counters.gpu_tokens += tokens
            elif chunk.gpu_state is Residency.ABSENT and len(self._waiting) < _MAX_WAITING:
                self._waiting.append(chunk)
        if self._waiting and self._task is None:
            self._task = asyncio.ensure_future(self._copy_waiting())

    async def settle(self) -> None:
        """Wait until no copy is waiting or running."""
        while self._task is not None:
            await asyncio.wait({self._task})

    def stop(self) -> None:
        """Make no further copies, except those that a thread makes now."""
        self._waiting.clear()

    async def close(self) -> None:
        """Free the memory. No thread copies any more."""
        await self.settle()
        self.arena.close()

    def write_to(self, out: StatsResponse) -> None:
        """Fill the fields of a StatsResponse."""
        out.gpu_arena_bytes, out.gpu_arena_used_bytes = self.arena.size_bytes, self.arena.used_bytes
        out.gpu_chunks = sum(chunk.readable_gpu_slot is not None for chunk in self._copied)

    # ---- copies -----------------------------------------------------------------------------------------------

    async def _copy_waiting(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    await self._threads.copy(partial(self._write, batch))
                except BaseException as error:  # whatever the driver raises; and if cancelled, the copy may still run
                    self._fail(error)
                    if not isinstance(error, Exception):
                        raise
                finally:
                    self._finish([chunk for chunk, _, _ in batch])
        finally:
            self._task = None

    def _next_batch(self) -> list[tuple[Chunk, memoryview, Slot]]:
        """Find slots for the next waiting chunks. Returns each chunk, its payload and its slot."""
        batch, size_bytes = list[tuple[Chunk, memoryview, Slot]](), 0
        for _ in range(min(len(self._waiting), _BATCH_CHUNKS)):
            chunk = self._waiting.popleft()
            if chunk.gpu_state is not Residency.ABSENT or not chunk.is_readable:
                continue
            parent = self._parent_of(chunk)
            slot = self._allocate(chunk, parent)
            if slot is None:
                continue
            assert chunk.slot is not None, "a readable chunk has a slot"
            chunk.gpu_slot, chunk.gpu_state = slot, Residency.IN_FLIGHT
            self._copied.add(chunk)
            self._quotas.insert(chunk, footprint(chunk.size_bytes), parent)
            batch.append((chunk, self._tiers.arena.read(chunk.slot), slot))
            size_bytes += chunk.size_bytes
            if size_bytes >= _BATCH_BYTES:
                break
        return batch

    def _write(self, batch: Sequence[tuple[Chunk, memoryview, Slot]]) -> None:
        """Copy payloads. Runs on a thread; the chunks are in use, so their slots stay."""
        for _, payload, slot in batch:
            self.arena.write(slot, payload)

    def _finish(self, chunks: Sequence[Chunk]) -> None:
        """Make complete copies visible. After a failure, the chunks have none."""
        for chunk in chunks:
            if chunk.gpu_slot is not None:
                chunk.gpu_state = Residency.PRESENT
                self._tiers.counters.gpu_copies += 1
            self._tiers.on_released(chunk)

    def _fail(self, error: BaseException) -> None:
        """Forget all copies. Nothing is written to their memory any more, so workers may go on reading it."""
        log.error(
            "the GPU arena failed; chunks are read from the arena in host memory",
            error=f"{type(error).__name__}: {error}",
        )
        self.failed = True
        self._waiting.clear()
        for chunk in self._copied:
            self._quotas.remove(chunk)
            chunk.gpu_slot, chunk.gpu_state = None, Residency.ABSENT
        self._copied.clear()

    # ---- slots ------------------------------------------------------------------------------------------------

    def _parent_of(self, chunk: Chunk) -> Chunk | None:
        """Return a chunk's parent if this tier has it."""
        parent = self._tiers.parent_of(chunk)
        return parent if parent is not None and parent in self._quotas else None

    def _allocate(self, chunk: Chunk, parent: Chunk | None) -> Slot | None:
        """Find a slot, dropping other copies if the eviction policy prefers the chunk.

        Copies that were used as recently stay: those of the same prompt, if it is larger than the memory.
        """
        slot = self.arena.allocate(chunk.size_bytes)
        if slot is not None:
            return slot
        if footprint(chunk.size_bytes) > self.arena.size_bytes or not self._quotas.admits(chunk, parent):
            return None
        for _ in range(_MAX_REPLACED):
            victim = next((c for c in self._quotas.victims(chunk.tenant, own=False) if not c.in_use), None)
            if victim is None or victim.last_used_at >= chunk.last_used_at:
                return None
            self._tiers.counters.gpu_evictions += 1
            self._drop(victim)
            if (slot := self.arena.allocate(chunk.size_bytes)) is not None:
                return slot
        return None

    def _drop(self, chunk: Chunk) -> None:
        """Free the unused slot of a chunk; ignore chunks without one."""
        if chunk.gpu_slot is not None:
            self._quotas.remove(chunk)
            self._copied.remove(chunk)
            self.arena.free(chunk.gpu_slot)
            chunk.gpu_slot, chunk.gpu_state = None, Residency.ABSENT

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots and quotas add up."""
        self.arena.check_integrity()
        self._quotas.check_integrity()
        if self.failed:
            assert not self._copied, "copies in memory that failed"
            return
        pages = sum(footprint(chunk.size_bytes) for chunk in self._copied)
        assert pages == self.arena.used_bytes, f"copies have {pages} bytes, the GPU arena {self.arena.used_bytes}"
        for chunk in self._copied:
            assert chunk.gpu_slot is not None, "a copy without a slot"
            assert chunk.slot is not None, "a copy of a chunk that has left the arena"
            assert (chunk in self._quotas) == chunk.indexed, "the GPU arena's books differ"
