"""Insertion of fetched chunks: decodes payloads into arena slots, then indexes them.

It works on groups of chunks, in order. Several threads decode a group, each an equal number of chunks: if a thread took
one chunk at a time, it would have to wait for the event loop after every chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvsidecar import keys

from cache_daemon.memory.arena import Slot, footprint
from cache_daemon.remote.fetch_request import FetchRequest
from cache_daemon.remote.remote_record import InvalidRecord, RemoteRecord, decode_payload
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.insertion import ChunkInserter, Insertion, InsertOutcome, NewChunk
from cache_daemon.store.leases import LeaseGuard
from cache_daemon.store.tenant_accounts import TenantAccount
from cache_daemon.store.yield_timer import YieldTimer

# Threads that decode a group: more than two compete for memory bandwidth.
_THREADS = 2

T = TypeVar("T")


@dataclass(eq=False)
class _Payload:
    """A payload to decode into its slot.

    ``slot`` is None if this node already has the chunk, and after the insertion.
    """

    record: RemoteRecord
    parts: list[bytes]
    slot: Slot | None
    error: InvalidRecord | None = None


class RemoteChunkInserter:
    """Inserts chunks of the remote tier into one store.

    ``run_in_thread`` runs the decoding. ``on_inserted`` is called with every inserted chunk and the seconds until it
    expires in the backend.
    """

    def __init__(
        self,
        inserter: ChunkInserter,
        tier: RemoteTier,
        run_in_thread: Callable[[Callable[[], None]], Awaitable[None]],
        on_inserted: Callable[[Chunk, float], None],
    ) -> None:
        self._tiers, self._inserter, self._tier = inserter.tiers, inserter, tier
        self._run_in_thread, self._on_inserted = run_in_thread, on_inserted

    def parent_is_live(self, root: bytes, entry: RemoteRecord) -> bool:
        """Return True if this node has the parent of a record's chunk."""
        header = entry.header
        return self._inserter.parent_is_live(root, header.parent_prefix_hash, header.start_position)

    async def insert(
        self,
        request: FetchRequest,
        group: Sequence[RemoteRecord],
        payloads: Sequence[list[bytes] | None],
        lease: LeaseGuard,
        is_invalidated: Callable[[], bool],
        delay_persist: bool,
    ) -> bool:
        """Insert chunks, each after its parent, and lease them.

        Returns True if all of them are in the arena. Returns False if a payload is missing or corrupt, the arena is
        full, the caller's share of it is leased, or ``is_invalidated`` reports a deletion of the chunks.
        ``delay_persist`` says that a request still waits for more chunks; the inserted chunks then become durable a
        moment later.
        """
        if (
            not self.parent_is_live(request.root, group[0])
            and self._tiers.index.get(group[0].header.prefix_hash) is None
        ):
            return False
        tenant = self._tiers.accounts.account_of(request.tenant)
        with self._inserter.begin([group[0].header.parent_prefix_hash]) as insertion:
            pieces = self._allocate_slots(request, group, payloads, tenant, lease)
            try:
                await self._decode_all(pieces)
                listed = await self._insert_all(
                    insertion, request, pieces, tenant, lease, is_invalidated, delay_persist
                )
                return listed and len(pieces) == len(group)
            finally:
                for piece in pieces:
                    if piece.slot is not None:
                        self._tiers.release_slot(piece.slot)

    def _allocate_slots(
        self,
        request: FetchRequest,
        group: Sequence[RemoteRecord],
        payloads: Sequence[list[bytes] | None],
        tenant: TenantAccount,
        lease: LeaseGuard,
    ) -> list[_Payload]:
        """Allocate slots for the leading chunks that have a payload, and fit into the arena and the caller's share."""
        pieces: list[_Payload] = []
        usage, reserved = request.usage, 0  # bytes of chunks that are leased once they are inserted
        for entry, parts in zip(group, payloads, strict=True):
            header = entry.header
            if parts is None:
                self._tier.queue_removal(request.root, header.prefix_hash)
                break
            present = self._tiers.index.get(header.prefix_hash)
            size = footprint(header.payload_bytes)
            if usage is not None and (present is None or present not in usage) and size > usage.free_bytes - reserved:
                break
            if present is not None:  # another request was faster
                lease.add([present])
                pieces.append(_Payload(entry, [], None))
                continue
            slot = self._inserter.arena_evictor.allocate(header.payload_bytes, tenant)
            if slot is None:
                break
            pieces.append(_Payload(entry, parts, slot))
            reserved += size
        return pieces

    async def _decode_all(self, pieces: Sequence[_Payload]) -> None:
        """Fill the slots on threads. Returns or raises only when no thread uses the slots any more."""
        todo = [piece for piece in pieces if piece.slot is not None]
        work = [self._run_in_thread(self._decode_work(part)) for n in range(_THREADS) if (part := todo[n::_THREADS])]
        if not work:
            return
        for done in await await_uninterruptible(asyncio.gather(*work, return_exceptions=True)):
            if isinstance(done, BaseException):
                raise done

    def _decode_work(self, pieces: Sequence[_Payload]) -> Callable[[], None]:
        def work() -> None:
            for piece in pieces:
                assert piece.slot is not None
                try:
                    self._decode(piece, piece.slot)
                except InvalidRecord as error:
                    piece.error = error
                piece.parts = []

        return work

    def _decode(self, piece: _Payload, slot: Slot) -> None:
        decode_payload(self._tier.cipher, piece.record, piece.parts, self._tiers.arena.read(slot))

    async def _insert_all(
        self,
        insertion: Insertion,
        request: FetchRequest,
        pieces: Sequence[_Payload],
        tenant: TenantAccount,
        lease: LeaseGuard,
        is_invalidated: Callable[[], bool],
        delay_persist: bool,
    ) -> bool:
        yield_timer = YieldTimer()
        for piece in pieces:
            if piece.slot is None:
                continue
            await yield_timer.maybe_yield()
            header = piece.record.header
            if piece.error is not None:
                self._tier.reject(request.root, header.prefix_hash, piece.error)
                return False
            ids, left = keys.token_bytes(header.token_ids[:]), self._tier.seconds_left(piece.record)
            new_chunk, piece.slot = (
                NewChunk(header, ids, tenant, piece.slot, request.kept.at(header.start_position), is_invalidated()),
                None,
            )
            outcome = insertion.insert([new_chunk], delay_persist=delay_persist)[0]
            chunk = self._tiers.index.get(header.prefix_hash)
            if chunk is None or outcome is InsertOutcome.DELETED:
                return False
            lease.add([chunk])
            if outcome is InsertOutcome.INSERTED:
                self._on_inserted(chunk, left)
        return True


async def await_uninterruptible(work: Awaitable[T]) -> T:
    """Await work that cannot be stopped; raise a cancellation only after its end."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        consume_exception(running)
        raise cancelled
    return running.result()


def consume_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a task that no caller awaits."""
    if not task.cancelled():
        task.exception()
