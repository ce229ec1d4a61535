"""Sliding-window release: saves and frees blocks behind every layer's window.

Applies to models in which all layers have a sliding window. While a sequence runs, the connector saves the part of the
sequence that is behind the window. The part's blocks are freed after the save. The blocks are freed without a save if
no daemon is attached or the request does not write to the cache, if an earlier save failed, or if other sequences need
the blocks. Then the remaining tokens of the sequence are not saved either, because a lookup cannot find them without
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

# A part of fewer than _MIN_SAVED_TOKENS is not saved yet. If the connector has got more than _MAX_UNSAVED_TOKENS and
# stored none of them, its chunks are too long, and the sequence is never saved.
_MIN_SAVED_TOKENS, _MAX_UNSAVED_TOKENS = 128, 8192


@dataclass(frozen=True)
class _PendingSave:
    """Blocks of a pending save, and the block table that shares them.

    ``pages`` has its own references, so the sequence may free its table ``source`` during the save.
    """

    pages: BlockTable
    source: BlockTable


class WindowReleaser:
    """Releases blocks behind the window. Only the engine's thread uses it.

    The connector calls ``on_saved`` on another thread, with the stored prefix, or None if the save failed.
    """

    def __init__(self, pool: KVPool, connector: KVConnector, on_saved: SaveCallback) -> None:
        self._pool, self._connector, self._on_saved = pool, connector, on_saved
        self._pending: dict[Sequence, _PendingSave] = {}

    @property
    def busy(self) -> bool:
        """True while a part is being saved."""
        return bool(self._pending)

    @property
    def num_orphans(self) -> int:
        """Number of pending saves whose sequences ended or restarted."""
        return sum(sequence.kv.table is not part.source for sequence, part in list(self._pending.items()))

    @property
    def tables(self) -> list[BlockTable]:
        """Blocks of the pending saves."""
        return [part.pages for part in self._pending.values()]

    @property
    def pending_pages(self) -> int:
        """Number of blocks to which only pending saves and their sequences refer."""
        return sum(
            self._pool.count_exclusive_pages(part.pages, part.source if sequence.kv.table is part.source else None)
            for sequence, part in self._pending.items()
        )

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks that no layer will read again, except those still to be saved."""
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
        """Frees all blocks behind the window, saved or not."""
        for sequence in sequences:
            kv = sequence.kv
            if self._pool.window and kv.table is not None and not kv.is_loading:
                self._release_prefix(kv.table, self._pool.first_visible(kv.num_computed))

    def finish_save(self, sequence: Sequence, stored: StoredPrefix | None) -> None:
        """Records the end of a save, and frees its blocks. ``stored`` is None if it failed."""
        part = self._pending.pop(sequence)
        if sequence.in_batch and sequence.kv.table is part.source:
            if stored is None:
                self.release_unsaved([sequence])
            else:
                sequence.kv.record_stored(stored)
                self.release(sequence)
        self._pool.zero_exclusive(part.pages)  # this may be the last reference, if the sequence released its own
        self._pool.free(part.pages)

    def _release_prefix(self, table: BlockTable, tokens: int) -> None:
        """Frees leading blocks after zeroing them. They may contain NaN, which attention would multiply by zero."""
        freed = self._pool.share(table, tokens)
        self._pool.release_prefix(table, tokens)
        self._pool.zero_exclusive(freed)
        self._pool.free(freed)

    def _save_first(self, sequence: Sequence, table: BlockTable, visible: int) -> bool:
        """True if a save still needs blocks behind the window. Starts the save once enough tokens are unsaved."""
        kv = sequence.kv
        stored = kv.stored.tokens
        if not sequence.request.cache.write or kv.plan is not None:
            return False
        if visible <= stored or sequence in self._pending:
            return True
        if stored < table.first_valid_token or kv.offered - stored > _MAX_UNSAVED_TOKENS:
            return False  # an earlier part was freed unsaved, or the connector stores nothing
        if visible - max(kv.offered, stored) < _MIN_SAVED_TOKENS:
            return True
        kv.offer(visible)
        pages = self._pool.share(table, visible)
        self._pending[sequence] = _PendingSave(pages, table)
        try:
            if self._connector.save_part(sequence, self._pool, pages, visible, self._on_saved):
                return True
        except Exception:  # a failed save does not affect the answer
            log.exception("storing a part of a sequence failed", request=sequence.request.id)
        del self._pending[sequence]
        self._pool.free(pages)
        return False
