"""Insertion of verified chunks: the only path into the index.

Commit, remote fetch and bulk transfer call ``Insertion.insert``; a restart calls ``ChunkInserter.restore`` for each
durable chunk. So a chunk is indexed once, after its parent, even if several callers insert the same chunk. And no chunk
of a group is evicted to make space for the next chunk of that group.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_COMMITTED
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.memory.arena import Slot
from cache_daemon.store.arena_evictor import ArenaEvictor
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.hint_applier import HintApplier
from cache_daemon.store.index_evictor import IndexEvictor
from cache_daemon.store.loss_cause import LossCause, LostChunk
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.pins import Pins
from cache_daemon.store.prompt_hints import ChunkHints
from cache_daemon.store.tenant_accounts import TenantAccount
from cache_daemon.store.tier_manager import TierManager


class InsertOutcome(enum.Enum):
    """Result of the insertion of one chunk."""

    INSERTED = enum.auto()
    PRESENT = enum.auto()  # it was indexed already
    PARENT_MISSING = enum.auto()
    DELETED = enum.auto()
    ENTRIES_EXCEEDED = enum.auto()
    INDEX_FULL = enum.auto()


_OUTCOMES = {
    None: InsertOutcome.INSERTED,
    LossCause.ENTRY_QUOTA: InsertOutcome.ENTRIES_EXCEEDED,
    LossCause.INDEX_FULL: InsertOutcome.INDEX_FULL,
}


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A verified payload in its slot, with its header.

    ``header`` is complete. ``ids`` are its token ids (uint32 little-endian); insertion removes them from the header.
    """

    header: ChunkHeader
    ids: bytes
    tenant: TenantAccount
    slot: Slot
    hints: ChunkHints
    invalidated: bool = False  # a deletion since the reservation includes this chunk


@dataclass(frozen=True)
class ChunkInserter:
    """Begins insertions into one store. ``persistence`` is None without a durable tier."""

    tiers: TierManager
    arena_evictor: ArenaEvictor
    index_evictor: IndexEvictor
    persistence: Persistence | None
    pins: Pins
    hints: HintApplier

    def begin(self, parents: Iterable[bytes] = ()) -> Insertion:
        """Begin a group of chunks, some of which are children of ``parents``.

        Use the result as a context manager.
        """
        return Insertion(self, parents)

    def parent_is_live(self, root: bytes, parent_key: bytes, start: int) -> bool:
        """Return True if a chunk's parent is indexed, ends at ``start`` and will stay.

        Returns False if the parent was evicted or superseded meanwhile.
        """
        if parent_key == root:
            return start == 0
        parent = self.tiers.index.get(parent_key)
        return (
            parent is not None
            and parent.root == root
            and parent.end_position == start
            and not parent.write_state.superseder_count
        )

    def restore(self, chunk: Chunk) -> bool:
        """Index a durable chunk of an earlier start, after its parent.

        Returns False when its parent is missing or ends at another position.
        """
        if not self.parent_is_live(chunk.root, chunk.parent_key, chunk.start_position):
            return False
        self.tiers.index_chunk(chunk)
        return True


@dataclass(eq=False)
class Insertion:
    """A group of chunks being inserted.

    Until it is closed, the chunks that it has inserted or found, and their parents, stay in the store; durable chunks
    may leave the arena. Runs on the event loop.
    """

    inserter: ChunkInserter
    parents: Iterable[bytes] = ()
    _anchored: list[Chunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key in dict.fromkeys(self.parents):
            self._anchor(self.inserter.tiers.index.get(key))

    def __enter__(self) -> Insertion:
        return self

    def __exit__(self, *_: object) -> None:
        anchored, self._anchored = self._anchored, []
        for chunk in anchored:
            chunk.anchors -= 1
            self.inserter.tiers.update_evictable(chunk)

    def insert(self, new_chunks: Sequence[NewChunk], *, delay_persist: bool = False) -> list[InsertOutcome]:
        """Index chunks, parents before children, and queue them for the durable tier.

        Takes ownership of the slots, and frees the slots of chunks that it does not insert. ``delay_persist`` says that
        a request waits for more chunks of the group; the inserted chunks are then written a moment later.
        """
        return [self._insert(new_chunk, delay_persist) for new_chunk in new_chunks]

    def _insert(self, new_chunk: NewChunk, delay_persist: bool) -> InsertOutcome:
        tiers, header = self.inserter.tiers, new_chunk.header
        present = tiers.index.get(header.prefix_hash)
        parent = tiers.index.get(header.parent_prefix_hash)
        if new_chunk.invalidated:
            outcome = InsertOutcome.DELETED
        elif present is not None:
            outcome = InsertOutcome.PRESENT
            self._anchor(present)
            self.inserter.hints.record_use(present, new_chunk.hints)
        elif not self.inserter.parent_is_live(header.root, header.parent_prefix_hash, header.start_position):
            outcome = InsertOutcome.PARENT_MISSING
        else:
            self._anchor(parent)
            cause = self.inserter.index_evictor.make_space(new_chunk.tenant, header.token_count)
            outcome = _OUTCOMES[cause]
            if cause is not None:
                lost = (header.parent_prefix_hash, header.start_position, new_chunk.ids, cause)
                tiers.record_loss(LostChunk(new_chunk.tenant, *lost))
        if outcome is not InsertOutcome.INSERTED:
            tiers.release_slot(new_chunk.slot)
            return outcome
        header.ClearField("token_ids")
        chunk = Chunk(
            header,
            new_chunk.ids,
            new_chunk.tenant,
            new_chunk.slot,
            arena_state=Residency.PRESENT,
            last_used_at=tiers.clock(),
            expires_at=new_chunk.hints.expires_at,
            retained_until=new_chunk.hints.retained_until,
            group=new_chunk.hints.group,
            low_priority=new_chunk.hints.low_priority,
        )
        self._make_visible(chunk, delay_persist)
        self._anchor(chunk)
        return outcome

    def _make_visible(self, chunk: Chunk, delay_persist: bool) -> None:
        """Index a chunk and let it supersede siblings that are a prefix of it.

        A sibling stays if its pins cannot move to the new chunk.
        """
        inserter, tiers, persistence = self.inserter, self.inserter.tiers, self.inserter.persistence
        tiers.index_chunk(chunk)
        for old in tiers.index.superseded_by(chunk):
            if not inserter.pins.transfer(old, chunk):
                continue
            inserter.hints.inherit(chunk, old)
            if persistence is not None:
                persistence.supersede(chunk, old)
            else:
                tiers.remove_subtree(old, LossCause.SUPERSEDED)
        tiers.emit(EVENT_TYPE_COMMITTED, chunk)
        if persistence is not None:
            (persistence.persist_delayed if delay_persist else persistence.persist)(chunk)

    def _anchor(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            chunk.anchors += 1
            self._anchored.append(chunk)
            self.inserter.tiers.update_evictable(chunk)
