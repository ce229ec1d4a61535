"""Applies deletions of other nodes on this node, including those during its downtime.

Each deletion replaces one small value in the backend, the deletions epoch. When a poll shows that this value changed,
the node reads the epochs of all tenants of which it has chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from itertools import islice
from math import inf

import structlog
from kvsidecar import keys

from cache_daemon.remote import tombstones
from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.fetch_request import InflightLookups
from cache_daemon.remote.remote_record import TenantEpochs, new_epoch
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.remote.tombstones import DeletionWriter
from cache_daemon.remote.write_behind import WriteBehindQueue
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.chunk_deleter import ChunkDeleter
from cache_daemon.store.yield_timer import YieldTimer

# Poll interval; delay of the first poll; and the pause after a poll of all tenants, as a multiple of that poll's
# duration.
_POLL_SECONDS, _FIRST_POLL_SECONDS, _IDLE_FACTOR = 2.0, 0.25, 10.0
_TENANTS_PER_READ = 128
# If an epoch must be written back again within this time, two nodes contest it.
_CONTESTED_SECONDS = 600.0

log = structlog.get_logger("cache_daemon")


class TombstoneApplier:
    """Polls the backend for deletions, and applies them to the chunks of this node.

    It also writes back deletions that the backend has lost. Runs on the event loop.
    """

    def __init__(
        self,
        tier: RemoteTier,
        epochs: DeletionEpochs,
        deletions: DeletionWriter,
        write_behind: WriteBehindQueue,
        deleter: ChunkDeleter,
        lookups: InflightLookups,
    ) -> None:
        self._tier, self._epochs, self._deletions = tier, epochs, deletions
        self._write_behind, self._deleter, self._lookups = write_behind, deleter, lookups
        self._index = deleter.tiers.index
        self.num_restored = 0  # deletions repeated because the backend had lost them
        self._unapplied: dict[tuple[bytes, EpochChange], float] = {}  # change to apply -> time of its observation
        self._wake = asyncio.Event()
        self._last_poll: tuple[int, int, bytes | None] | None = None  # state at the last poll of all tenants
        self._unseen_tenants: dict[bytes, None] = {}  # tenants with chunks here whose epochs are unknown
        self._next_poll_at = 0.0
        self._written_back: dict[bytes, float] = {}  # time of the last write-back (monotonic), by root
        deleter.tiers.on_indexed.append(self._on_indexed)
        deleter.tiers.on_unindexed.append(self._on_unindexed)
        epochs.on_change.append(self.on_epoch_change)

    def _on_indexed(self, chunk: Chunk) -> None:
        """Poll a tenant when its first chunk is indexed.

        A node notices a deletion only if it knows the epoch from before.
        """
        if chunk.root not in self._epochs:
            self._unseen_tenants[chunk.root] = None
            self._wake.set()

    def _on_unindexed(self, chunk: Chunk) -> None:
        if not self._index.has_chunks_of(chunk.root):
            self._unseen_tenants.pop(chunk.root, None)

    def on_epoch_change(self, root: bytes, change: EpochChange) -> None:
        """Schedule the local deletion of chunks that another node has deleted."""
        if change is EpochChange.EPOCH_LOST:
            return
        root = b"" if change is EpochChange.ALL_DELETED else root
        if change is not EpochChange.CHUNKS_DELETED:
            self._lookups.invalidate(root)
        if change is EpochChange.DELETION_LOST and (root, change) in self._unapplied:
            return
        self._unapplied[root, change] = self._epochs.observed_at(root)
        self._wake.set()

    async def run(self) -> None:
        """Poll and apply until cancelled."""
        await self._forget_absent_tenants()
        while True:
            self._wake.clear()
            await self._apply()
            await self._attempt(self._poll())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_POLL_SECONDS if self._last_poll is None else _POLL_SECONDS):
                    await self._wake.wait()

    @staticmethod
    async def _attempt(step: Awaitable[None]) -> bool:
        """Await a step, which is repeated later if it fails. Returns whether it succeeded."""
        try:
            await step
        except RemoteFailed as error:
            log.debug("reading or applying deletions of the remote tier failed", why=str(error))
        except Exception:
            log.exception("applying deletions of other nodes failed, going on")
        else:
            return True
        return False

    async def _forget_absent_tenants(self) -> None:
        """Forget tenants that no longer have chunks on this node."""
        yield_timer = YieldTimer()
        for root in self._epochs:
            if not self._index.has_chunks_of(root):
                self._epochs.forget(root)
            await yield_timer.maybe_yield()

    # ---- polling --------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        if not self._tier.reads.allows_calls:
            return
        while self._last_poll is not None and self._unseen_tenants:
            await self._poll_tenants(list(islice(self._unseen_tenants, _TENANTS_PER_READ)))
        if time.monotonic() < self._next_poll_at:
            return
        state = (self._tier.backend_generation, self._deletions.num_done, await self._deletions_epoch())
        if state == self._last_poll:
            return
        began = time.monotonic()
        if self._epochs.is_global_deletion_lost(await self._tier.read_global_epoch()):
            self.on_epoch_change(b"", EpochChange.DELETION_LOST)
        await self._poll_all_tenants()
        self._last_poll = state
        self._next_poll_at = time.monotonic() + _IDLE_FACTOR * (time.monotonic() - began)

    async def _deletions_epoch(self) -> bytes | None:
        """Return the deletions epoch. A backend without that epoch is new or has lost its data, and gets one."""
        epoch = await self._tier.read_deletions_epoch()
        if epoch is None and self._write_behind.is_writing:
            with contextlib.suppress(RemoteFailed):  # polling must work without the right or space to write
                await self._tier.create_deletions_epoch()
                epoch = await self._tier.read_deletions_epoch()
        return epoch

    async def _poll_all_tenants(self) -> None:
        after: bytes | None = b""
        while after is not None:
            roots: list[bytes] = []
            for root in self._index.roots_from(after):
                if root != after:
                    roots.append(root)
                if len(roots) == _TENANTS_PER_READ:
                    break
            await self._poll_tenants(roots)
            after = roots[-1] if len(roots) == _TENANTS_PER_READ else None
        # Tenants that were deleted have no chunks here, so the loop above skips them. Their epochs show whether the
        # backend lost the deletion.
        deleted = [root for root in self._epochs.tenants_with_deletions() if not self._index.has_chunks_of(root)]
        for at in range(0, len(deleted), _TENANTS_PER_READ):
            await self._poll_tenants(deleted[at : at + _TENANTS_PER_READ])

    async def _poll_tenants(self, roots: list[bytes]) -> None:
        for root, epochs in zip(roots, await self._tier.read_epochs(roots) if roots else [], strict=True):
            change = self._epochs.observe(root, epochs)
            self._unseen_tenants.pop(root, None)
            # A lost deletion must be written back before this node creates a new epoch.
            is_lost = change is EpochChange.NONE and self._epochs.is_epoch_lost(root, epochs)
            if is_lost and self._write_behind.is_writing:
                with contextlib.suppress(RemoteFailed):  # else the next write of a chunk of the tenant creates it
                    await self._tier.create_tenant_epoch(root)
                    self._epochs.observe(root, (await self._tier.read_epochs([root]))[0])

    # ---- applying -------------------------------------------------------------------------------------------

    async def _apply(self) -> None:
        """Apply scheduled deletions. Deletions that need the backend come last; those that fail stay scheduled."""
        for (root, change), observed_at in sorted(
            self._unapplied.items(), key=lambda one: one[0][1].value, reverse=True
        ):
            applied = await self._attempt(self._apply_change(root, change, observed_at))
            if applied and self._unapplied.get((root, change)) == observed_at:
                del self._unapplied[root, change]

    async def _apply_change(self, root: bytes, change: EpochChange, observed_at: float) -> None:
        if change is EpochChange.DELETION_LOST:
            await self._write_back(root)
        elif change is EpochChange.CHUNKS_DELETED:
            await self._apply_chunk_deletions(root, observed_at)
        else:
            dropped = await self._deleter.delete(root, None, before=observed_at)
            self._epochs.mark_applied(root, observed_at)
            log.info("removed chunks that another node has deleted", chunks=dropped)

    async def _apply_chunk_deletions(self, root: bytes, observed_at: float) -> None:
        present = await tombstones.read_tombstones(self._tier, root)
        async with self._write_behind.write_lock:  # after the running write, whose chunks may be stored
            new_keys = frozenset(name[: keys.HASH_BYTES] for name in self._epochs.unapplied_tombstones(root, present))
            self._lookups.invalidate(root, new_keys)
            # Before the local deletion, so that a chunk that is computed again is written again, after the removal.
            for key in filter(self._write_behind.forget_stored, new_keys):
                self._tier.queue_removal(root, key)
            for key in sorted(new_keys):
                chunk = self._index.get(key)
                if chunk is not None and chunk.root == root:
                    await self._deleter.delete(root, chunk)
            # Before the write-back, which may fail and is then repeated: chunks computed meanwhile must stay.
            self._epochs.record_tombstones(root, present)
            await self._write_back_chunks(root, present)
        self._write_behind.wake_for_corrupt()
        self._epochs.mark_applied(root, observed_at)

    # ---- deletions that the backend has lost ----------------------------------------------------------------

    async def _write_back(self, root: bytes) -> None:
        """Write lost deletion epochs back, which invalidates older records.

        The backend gets the same epoch again, so nodes that know the deletion need not apply it. If two nodes
        disagree about which epoch is later, each overwrites the other's; when this node finds its epoch lost again
        within ten minutes, it writes a new deletion epoch, which ends the conflict.
        """
        async with self._write_behind.write_lock:
            global_only = TenantEpochs(await self._tier.read_global_epoch(), None, None)
            epochs = (await self._tier.read_epochs([root]))[0] if root else global_only
            for owner, epoch in self._epochs.lost_deletions(root, epochs).items():
                again = time.monotonic() - self._written_back.get(owner, -inf) < _CONTESTED_SECONDS
                if again:
                    epoch = new_epoch(deletion=True)
                    self._epochs.record_own_deletion(owner, epoch)
                    del self._written_back[owner]  # if the write fails, the next attempt writes the same epoch
                name = (
                    self._tier.key_schema.tenant_epoch_key(owner) if owner else self._tier.key_schema.global_epoch_key
                )
                await self._tier.write([(name, epoch)], None)
                self._written_back[owner] = time.monotonic()
                if owner:
                    old = await tombstones.read_tombstones(self._tier, owner)
                    await tombstones.remove_tombstones(self._tier, owner, old)
                await tombstones.purge(self._tier, owner)
                self.num_restored += 1
                log.warning("the remote tier had lost a deletion; wrote it back", everything=not owner)
            if root:
                lacks_epoch = epochs.chunks_epoch is None and self._epochs.has_tombstones(root)
                await self._write_back_chunks(root, await tombstones.read_tombstones(self._tier, root), lacks_epoch)
            await tombstones.announce(self._tier)
        self._write_behind.wake_for_corrupt()

    async def _write_back_chunks(self, root: bytes, present: set[bytes], lacks_epoch: bool = False) -> None:
        """Write lost tombstones back.

        ``present`` are the tombstones that the backend has. ``lacks_epoch`` says that the chunks epoch is lost.
        """
        missing = self._epochs.missing_tombstones(root, present)
        if not missing and not lacks_epoch:
            return
        hashes = frozenset(name[: keys.HASH_BYTES] for name in missing)
        self._lookups.invalidate(root, hashes)
        await tombstones.write_tombstones(self._tier, root, missing)
        for key in hashes:
            self._tier.queue_removal(root, key)
        self.num_restored += 1
        log.warning("the remote tier had lost tombstones; wrote them back", chunks=len(hashes))
