"""Where all layers have a sliding window: what it has left behind is stored, and its pages go.

What is to be stored goes to the cache while the sequence still runs, a part at a time, and its pages are held until it
is there. Where nothing is stored, where storing failed, or where others need the room, they go at once; then the rest
of that sequence is not stored either, since nobody could find it without what comes before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from inference_svc.engine.kv_connector import KVConnector, SaveCallback
from inference_svc.engine.sequence import Sequence, SequenceState, StoredPrefix
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool

log = structlog.get_logger("engine")

# Parts of fewer tokens wait for more. Of chunks so long that nothing of so many offered tokens was stored, nothing is.
_MIN_SAVED_TOKENS, _MAX_UNSAVED_TOKENS = 128, 8192


@dataclass(frozen=True)
class _PendingSave:
    """Pages that the cache reads: a reference of their own, and the table that they are from."""

    held: BlockTable
    source: BlockTable


class WindowReleaser:
    """Only the engine's thread uses it. ``saved`` hears, on another one, what is stored of a sequence then."""

    def __init__(self, pool: KVPool, cache: KVConnector, saved: SaveCallback) -> None:
        self._pool, self._cache, self._saved = pool, cache, saved
        self._going: dict[Sequence, _PendingSave] = {}

    @property
    def busy(self) -> bool:
        """A part of something is being stored."""
        return bool(self._going)

    @property
    def orphans(self) -> int:
        """Parts of sequences that have ended, or begun anew."""
        return sum(sequence.table is not part.source for sequence, part in list(self._going.items()))

    @property
    def tables(self) -> list[BlockTable]:
        """What is held until it is stored."""
        return [part.held for part in self._going.values()]

    @property
    def pages(self) -> int:
        """How many will be free then: what a sequence has of them it lets go of."""
        return sum(
            self._pool.own_pages(part.held, part.source if sequence.table is part.source else None)
            for sequence, part in self._going.items()
        )

    def move(self, sequence: Sequence) -> None:
        """Lets go of what no layer sees from a sequence's next token on, and need not be stored any more."""
        table = sequence.table
        if not self._pool.window or table is None or sequence.gated:
            return
        seen = self._pool.first_seen(sequence.computed)
        if seen <= table.left:
            return
        if self._to_be_stored(sequence, table, seen):
            seen = min(seen, self._pool.first_whole(sequence.stored.tokens))
        self._leave(table, seen)

    def make_room(self, sequences: Iterable[Sequence]) -> None:
        """Lets go of all that no layer sees of these, stored or not."""
        for sequence in sequences:
            if self._pool.window and sequence.table is not None and not sequence.gated:
                self._leave(sequence.table, self._pool.first_seen(sequence.computed))

    def _leave(self, table: BlockTable, tokens: int) -> None:
        """Nobody has checked yet that all of it is finite, which whoever gets the pages next relies on."""
        gone = self._pool.share(table, tokens)
        self._pool.leave(table, tokens)
        self._pool.erase(gone)
        self._pool.free(gone)

    def stored(self, sequence: Sequence, stored: StoredPrefix | None) -> None:
        """Takes over what became of a part; None when it could not be stored."""
        part = self._going.pop(sequence)
        if sequence.state is SequenceState.RUNNING and sequence.table is part.source:
            if stored is None:
                self.make_room([sequence])
            else:
                sequence.stored = stored
                self.move(sequence)
        self._pool.erase(part.held)  # of which only this table may be left
        self._pool.free(part.held)

    def _to_be_stored(self, sequence: Sequence, table: BlockTable, seen: int) -> bool:
        """Whether what the window has left behind is still needed for storing it. Begins to store it when there is
        enough."""
        stored = sequence.stored.tokens
        if not sequence.cache.write or sequence.plan is not None:
            return False
        if seen <= stored or sequence in self._going:
            return True
        if (
            stored < table.since or sequence.parted - stored > _MAX_UNSAVED_TOKENS
        ):  # something before it is gone, or stays
            return False
        if seen - max(sequence.parted, stored) < _MIN_SAVED_TOKENS:
            return True
        sequence.parted = seen
        held = self._pool.share(table, seen)
        self._going[sequence] = _PendingSave(held, table)
        try:
            if self._cache.save_part(sequence, self._pool, held, seen, self._saved):
                return True
        except Exception:  # the answer does not depend on it
            log.exception("storing failed", request=sequence.id)
        del self._going[sequence]
        self._pool.free(held)
        return False
