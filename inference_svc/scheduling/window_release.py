"""Sliding-window release: stores and frees pages that no layer's window reaches any more.

Applies where all layers have a sliding window. Finished parts go to the connector while the sequence still runs; their
pages are held until they are stored. Without a connector, after a failed save, or when other sequences need the pages,
they are freed at once. The rest of that sequence is then not stored either, because a lookup could not find it without
the missing part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.kv_connector import KVConnector, SaveCallback
from inference_svc.sequence.sequence import Sequence

log = structlog.get_logger("engine")

# Shorter parts wait for more tokens. If chunks are so long that none of this many offered tokens was stored, the
# sequence is not stored at all.
_MIN_SAVED_TOKENS, _MAX_UNSAVED_TOKENS = 128, 8192


@dataclass(frozen=True)
class _PendingSave:
    """Pages that the connector reads, with references of their own, and the table that they come from."""

    pages: BlockTable
    source: BlockTable


class WindowReleaser:
    """Releases pages behind the window. Only the engine's thread uses it.

    ``on_saved`` is called on another thread with the stored prefix of a part, None when saving failed.
    """

    def __init__(self, pool: KVPool, connector: KVConnector, on_saved: SaveCallback) -> None:
        self._pool, self._connector, self._on_saved = pool, connector, on_saved
        self._pending: dict[Sequence, _PendingSave] = {}

    @property
    def busy(self) -> bool:
        """True while a part is being stored."""
        return bool(self._pending)

    @property
    def num_orphans(self) -> int:
        """Pending parts of sequences that ended or restarted."""
        return sum(sequence.kv.table is not part.source for sequence, part in list(self._pending.items()))

    @property
    def tables(self) -> list[BlockTable]:
        """Pages that are held until they are stored."""
        return [part.pages for part in self._pending.values()]

    @property
    def pending_pages(self) -> int:
        """Pages that will be free once everything pending is stored and its sequences release their references."""
        return sum(
            self._pool.count_exclusive_pages(part.pages, part.source if sequence.kv.table is part.source else None)
            for sequence, part in self._pending.items()
        )

    def release(self, sequence: Sequence) -> None:
        """Frees the pages that no layer reads from the next token on, except those still to be stored."""
        table = sequence.kv.table
        if not self._pool.window or table is None or sequence.kv.is_loading:
            return
        visible = self._pool.first_visible(sequence.kv.num_computed)
        if visible <= table.num_released:
            return
        if self._save_first(sequence, table, visible):
            visible = min(visible, self._pool.round_to_step(sequence.kv.stored.tokens))
        self._release_prefix(table, visible)

    def release_unsaved(self, sequences: Iterable[Sequence]) -> None:
        """Frees all pages behind the window, stored or not."""
        for sequence in sequences:
            kv = sequence.kv
            if self._pool.window and kv.table is not None and not kv.is_loading:
                self._release_prefix(kv.table, self._pool.first_visible(kv.num_computed))

    def finish_save(self, sequence: Sequence, stored: StoredPrefix | None) -> None:
        """Records the end of a save, None for a failed one, and frees its pages."""
        part = self._pending.pop(sequence)
        if sequence.in_batch and sequence.kv.table is part.source:
            if stored is None:
                self.release_unsaved([sequence])
            else:
                sequence.kv.record_stored(stored)
                self.release(sequence)
        self._pool.zero_exclusive(part.pages)  # the sequence may have released its reference
        self._pool.free(part.pages)

    def _release_prefix(self, table: BlockTable, tokens: int) -> None:
        """Zeroes pages before freeing them: they may contain NaN, and attention multiplies padding by zero."""
        freed = self._pool.share(table, tokens)
        self._pool.release_prefix(table, tokens)
        self._pool.zero_exclusive(freed)
        self._pool.free(freed)

    def _save_first(self, sequence: Sequence, table: BlockTable, visible: int) -> bool:
        """True if pages behind the window are still needed for a save. Starts a save once it is long enough."""
        kv = sequence.kv
        stored = kv.stored.tokens
        if not sequence.request.cache.write or kv.plan is not None:
            return False
        if visible <= stored or sequence in self._pending:
            return True
        if stored < table.first_valid_token or kv.offered - stored > _MAX_UNSAVED_TOKENS:
            return False  # an earlier part is gone, or is never stored
        if visible - max(kv.offered, stored) < _MIN_SAVED_TOKENS:
            return True
        kv.offer(visible)
        pages = self._pool.share(table, visible)
        self._pending[sequence] = _PendingSave(pages, table)
        try:
            if self._connector.save_part(sequence, self._pool, pages, visible, self._on_saved):
                return True
        except Exception:  # the answer does not depend on it
            log.exception("storing a part of a sequence failed", request=sequence.request.id)
        del self._pending[sequence]
        self._pool.free(pages)
        return False
