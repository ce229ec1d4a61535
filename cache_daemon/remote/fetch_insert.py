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
from cache_daemon.remote.downloads import to_its_end
from cache_daemon.remote.remote_record import Entry, Unfit, unpacked
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.insertion import Arrival, Inserter, Insertion, InsertOutcome
from cache_daemon.store.sessions import Hold
from cache_daemon.store.tenant_usage import Tenant
from cache_daemon.store.tier_manager import Tiers
from cache_daemon.store.yield_timer import Turns

# A group's payloads are unpacked by so many threads: more than two wait for each other's memory.
_THREADS = 2


class Owner(Protocol):
    """Whose chunks are placed: ``root`` and ``tenant``, and until when they are kept, on the store's clock."""

    @property
    def root(self) -> bytes: ...
    @property
    def tenant(self) -> bytes: ...
    @property
    def until(self) -> float: ...


@dataclass(eq=False)
class _Piece:
    """A payload on its way into its slot; ``slot`` is None where the chunk is here already, or is listed now."""

    entry: Entry
    parts: list[bytes]
    slot: Slot | None
    error: Unfit | None = None


class Placing:
    """Of one store. ``brought`` hears of every chunk that was placed and how many seconds the engine keeps it still;
    ``in_thread`` runs what is heavy."""

    def __init__(
        self,
        tiers: Tiers,
        inserter: Inserter,
        tier: RemoteTier,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]],
        brought: Callable[[Chunk, float], None],
    ) -> None:
        self._tiers, self._inserter, self._tier = tiers, inserter, tier
        self._in_thread, self._brought = in_thread, brought

    def continues(self, root: bytes, entry: Entry) -> bool:
        """Whether what an entry continues is here."""
        header = entry.header
        return self._inserter.continues(root, header.parent_prefix_hash, header.start_position)

    async def place(
        self,
        owner: Owner,
        group: Sequence[Entry],
        payloads: Sequence[list[bytes] | None],
        hold: Hold,
        void: Callable[[], bool],
        awaited: bool,
    ) -> bool:
        """Places chunks, each behind the one before, and holds them. False when not all of them are here then: one has
        no payload or not its own, there is no room, or, by ``void``, none is to come any more. With ``awaited`` a
        request waits for more, and they become durable in a moment."""
        if not self.continues(owner.root, group[0]) and self._tiers.index.get(group[0].header.prefix_hash) is None:
            return False
        tenant = self._tiers.accounts.of(owner.tenant)
        with self._inserter.begin([group[0].header.parent_prefix_hash]) as insertion:
            pieces = self._slots(owner.root, group, payloads, tenant, hold)
            try:
                await self._unpack(pieces)
                listed = await self._list(insertion, owner, pieces, tenant, hold, void, awaited)
                return listed and len(pieces) == len(group)
            finally:
                for piece in pieces:
                    if piece.slot is not None:
                        self._tiers.give_back(piece.slot)

    def _slots(
        self,
        root: bytes,
        group: Sequence[Entry],
        payloads: Sequence[list[bytes] | None],
        tenant: Tenant,
        hold: Hold,
    ) -> list[_Piece]:
        """As many of a group as have a payload and find room."""
        pieces: list[_Piece] = []
        for entry, parts in zip(group, payloads, strict=True):
            header = entry.header
            if parts is None:
                self._tier.drop(root, header.prefix_hash)
                break
            there = self._tiers.index.get(header.prefix_hash)
            if there is not None:  # somebody was faster
                hold.add([there])
                pieces.append(_Piece(entry, [], None))
                continue
            slot = self._tiers.allocate(header.payload_bytes, tenant)
            if slot is None:
                break
            pieces.append(_Piece(entry, parts, slot))
        return pieces

    async def _unpack(self, pieces: Sequence[_Piece]) -> None:
        """Fills the slots on threads, and returns, or raises, only when these are done with them."""
        todo = [piece for piece in pieces if piece.slot is not None]
        work = [self._in_thread(self._filling(part)) for n in range(_THREADS) if (part := todo[n::_THREADS])]
        if not work:
            return
        for done in await to_its_end(asyncio.gather(*work, return_exceptions=True)):
            if isinstance(done, BaseException):
                raise done

    def _filling(self, pieces: Sequence[_Piece]) -> Callable[[], None]:
        def work() -> None:
            for piece in pieces:
                assert piece.slot is not None
                try:
                    self._fill(piece, piece.slot)
                except Unfit as error:
                    piece.error = error
                piece.parts = []

        return work

    def _fill(self, piece: _Piece, slot: Slot) -> None:
        direct = self._tiers.arena.direct(slot)
        target = direct if direct is not None else memoryview(bytearray(slot.size_bytes))
        unpacked(self._tier.seal, piece.entry, piece.parts, target)
        if direct is None:
            self._tiers.arena.write(slot, target)

    async def _list(
        self,
        insertion: Insertion,
        owner: Owner,
        pieces: Sequence[_Piece],
        tenant: Tenant,
        hold: Hold,
        void: Callable[[], bool],
        awaited: bool,
    ) -> bool:
        turns = Turns()
        for piece in pieces:
            if piece.slot is None:
                continue
            await turns.give_way()
            header = piece.entry.header
            if piece.error is not None:
                self._tier.reject(owner.root, header.prefix_hash, piece.error)
                return False
            ids, left = keys.token_bytes(header.token_ids[:]), self._tier.left(piece.entry)
            arrival, piece.slot = Arrival(header, ids, tenant, piece.slot, owner.until, void()), None
            outcome = insertion.insert([arrival], awaited=awaited)[0]
            chunk = self._tiers.index.get(header.prefix_hash)
            if chunk is None or outcome is InsertOutcome.DELETED:
                return False
            hold.add([chunk])
            if outcome is InsertOutcome.INSERTED:
                self._brought(chunk, left)
        return True
