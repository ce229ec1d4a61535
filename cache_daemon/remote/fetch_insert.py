"""Placing payloads that came from a remote tier: unpacked into slots, a group at a time, and listed in their order.

A group is unpacked on several threads at once, each with as many chunks as the others: chunk after chunk, a thread
waits for the event loop between any two, and the loop for the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvsidecar import keys

from cache_daemon.memory.arena import Slot
from cache_daemon.remote.downloads import await_uninterruptible
from cache_daemon.remote.remote_record import InvalidRecord, RemoteRecord, decode_payload
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.insertion import ChunkInserter, Insertion, InsertOutcome, NewChunk
from cache_daemon.store.sessions import LeaseGuard
from cache_daemon.store.tenant_usage import TenantAccount
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.yield_timer import YieldTimer

# A group's payloads are unpacked by so many threads: more than two wait for each other's memory.
_THREADS = 2


class ChunkOwner(Protocol):
    """Whose chunks are placed: ``root`` and ``tenant``, and until when they are kept, on the store's clock."""

    @property
    def root(self) -> bytes: ...
    @property
    def tenant(self) -> bytes: ...
    @property
    def expires_at(self) -> float: ...


@dataclass(eq=False)
class _Payload:
    """A payload on its way into its slot; ``slot`` is None where the chunk is here already, or is listed now."""

    record: RemoteRecord
    parts: list[bytes]
    slot: Slot | None
    error: InvalidRecord | None = None


class RemoteChunkInserter:
    """Of one store. ``brought`` hears of every chunk that was placed and how many seconds the engine keeps it still;
    ``in_thread`` runs what is heavy."""

    def __init__(
        self,
        tiers: TierManager,
        inserter: ChunkInserter,
        tier: RemoteTier,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]],
        on_inserted: Callable[[Chunk, float], None],
    ) -> None:
        self._tiers, self._inserter, self._tier = tiers, inserter, tier
        self._in_thread, self._on_inserted = in_thread, on_inserted

    def parent_is_live(self, root: bytes, entry: RemoteRecord) -> bool:
        """Whether what an entry continues is here."""
        header = entry.header
        return self._inserter.parent_is_live(root, header.parent_prefix_hash, header.start_position)

    async def insert(
        self,
        owner: ChunkOwner,
        group: Sequence[RemoteRecord],
        payloads: Sequence[list[bytes] | None],
        hold: LeaseGuard,
        is_invalidated: Callable[[], bool],
        delay_persist: bool,
    ) -> bool:
        """Places chunks, each behind the one before, and holds them. False when not all of them are here then: one has
        no payload or not its own, there is no room, or, by ``void``, none is to come any more. With ``awaited`` a
        request waits for more, and they become durable in a moment."""
        if not self.parent_is_live(owner.root, group[0]) and self._tiers.index.get(group[0].header.prefix_hash) is None:
            return False
        tenant = self._tiers.accounts.account_of(owner.tenant)
        with self._inserter.begin([group[0].header.parent_prefix_hash]) as insertion:
            pieces = self._allocate_slots(owner.root, group, payloads, tenant, hold)
            try:
                await self._decode_all(pieces)
                listed = await self._insert_all(insertion, owner, pieces, tenant, hold, is_invalidated, delay_persist)
                return listed and len(pieces) == len(group)
            finally:
                for piece in pieces:
                    if piece.slot is not None:
                        self._tiers.release_slot(piece.slot)

    def _allocate_slots(
        self,
        root: bytes,
        group: Sequence[RemoteRecord],
        payloads: Sequence[list[bytes] | None],
        tenant: TenantAccount,
        hold: LeaseGuard,
    ) -> list[_Payload]:
        """As many of a group as have a payload and find room."""
        pieces: list[_Payload] = []
        for entry, parts in zip(group, payloads, strict=True):
            header = entry.header
            if parts is None:
                self._tier.queue_removal(root, header.prefix_hash)
                break
            there = self._tiers.index.get(header.prefix_hash)
            if there is not None:  # somebody was faster
                hold.add([there])
                pieces.append(_Payload(entry, [], None))
                continue
            slot = self._tiers.allocate(header.payload_bytes, tenant)
            if slot is None:
                break
            pieces.append(_Payload(entry, parts, slot))
        return pieces

    async def _decode_all(self, pieces: Sequence[_Payload]) -> None:
        """Fills the slots on threads, and returns, or raises, only when these are done with them."""
        todo = [piece for piece in pieces if piece.slot is not None]
        work = [self._in_thread(self._decode_work(part)) for n in range(_THREADS) if (part := todo[n::_THREADS])]
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
        direct = self._tiers.arena.writable_view(slot)
        target = direct if direct is not None else memoryview(bytearray(slot.size_bytes))
        decode_payload(self._tier.cipher, piece.record, piece.parts, target)
        if direct is None:
            self._tiers.arena.write(slot, target)

    async def _insert_all(
        self,
        insertion: Insertion,
        owner: ChunkOwner,
        pieces: Sequence[_Payload],
        tenant: TenantAccount,
        hold: LeaseGuard,
        is_invalidated: Callable[[], bool],
        delay_persist: bool,
    ) -> bool:
        turns = YieldTimer()
        for piece in pieces:
            if piece.slot is None:
                continue
            await turns.maybe_yield()
            header = piece.record.header
            if piece.error is not None:
                self._tier.reject(owner.root, header.prefix_hash, piece.error)
                return False
            ids, left = keys.token_bytes(header.token_ids[:]), self._tier.seconds_left(piece.record)
            arrival, piece.slot = NewChunk(header, ids, tenant, piece.slot, owner.expires_at, is_invalidated()), None
            outcome = insertion.insert([arrival], delay_persist=delay_persist)[0]
            chunk = self._tiers.index.get(header.prefix_hash)
            if chunk is None or outcome is InsertOutcome.DELETED:
                return False
            hold.add([chunk])
            if outcome is InsertOutcome.INSERTED:
                self._on_inserted(chunk, left)
        return True
