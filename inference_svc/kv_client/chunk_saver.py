"""Chunk saver: stores computed tokens of the KV pool in the daemon as chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kvkernels import pack_chunk
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import new_header
from kvsidecar.kv_transfer import chunk_writer
from kvsidecar.kv_transfer.chunk_writer import StoreTarget, WriteResult, store_chunks
from kvsidecar.kv_transfer.session import Session

from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.kv_client.chunk_loader import document_marks
from inference_svc.kv_client.client_context import ClientContext
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.sequence import Sequence


@dataclass(frozen=True)
class SaveSnapshot:
    """State of a sequence for one save of its first ``tokens`` tokens.

    The daemon already has the prefix ``stored``; ``table`` has the blocks of the other tokens. ``known`` are all tokens
    of the sequence so far. ``prefill`` is the number of computed prompt tokens, and the seconds of their prefill.
    """

    pool: KVPool
    table: BlockTable
    tokens: int
    stored: StoredPrefix
    known: list[int]
    marks: DocumentMarks
    prefill: tuple[int, float]

    @classmethod
    def of_finished(cls, sequence: Sequence, pool: KVPool) -> SaveSnapshot:
        """Snapshot of all reusable tokens of a finished sequence."""
        assert sequence.kv.table is not None
        known = sequence.tokens[: sequence.kv.num_exact]
        prefill = _prefill(sequence)
        return cls(pool, sequence.kv.table, len(known), sequence.kv.stored, known, document_marks(sequence), prefill)

    @classmethod
    def of_running(cls, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int) -> SaveSnapshot:
        """Snapshot of the first ``tokens`` tokens of a running sequence. Call it on the engine's thread."""
        prefill = _prefill(sequence)
        if not sequence.timestamps.first_token_at:
            prefill = (
                sequence.kv.num_computed - sequence.usage.num_cached,
                time.perf_counter() - sequence.timestamps.started_at,
            )
        known, marks = list(sequence.tokens), document_marks(sequence)
        return cls(pool, table, tokens, sequence.kv.stored, known, marks, prefill)


class ChunkSaver:
    """Saves snapshots. For one thread at a time.

    Calls ``yield_to_loads`` before each group of chunks.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context

    def save(
        self,
        session: Session,
        root: bytes,
        sequence: Sequence,
        snapshot: SaveSnapshot,
        yield_to_loads: Callable[[], None],
    ) -> StoredPrefix:
        """Save the tokens of a snapshot that are not stored yet; return the stored prefix."""
        before, complete = snapshot.stored, not snapshot.table.first_valid_token
        if (
            before.tokens < snapshot.table.first_valid_token
        ):  # a parent chunk is missing, so no match would ever find these tokens
            return before
        cache, context = sequence.request.cache, self._context
        target = StoreTarget(session, root, cache.tenant_salt, context.timeout_seconds, cache.hints)
        source = _SnapshotSource(context, session.max_chunk_tokens, snapshot, yield_to_loads)
        prefix = chunk_writer.StoredPrefix(before.tokens, before.prefix_hash)
        stored = store_chunks(target, source, prefix, can_restart=complete)
        tokens = stored.prefix.tokens
        if stored.before_last is None:
            return before if tokens == before.tokens else StoredPrefix()
        if session.remote and tokens == len(snapshot.known):
            # The last chunk ends with the sequence and not at a common boundary: a later save replaces it.
            return StoredPrefix(stored.before_last.tokens, stored.before_last.prefix_hash, tokens)
        return StoredPrefix(tokens, stored.prefix.prefix_hash, tokens)

    def save_part(
        self,
        session: Session,
        root: bytes,
        sequence: Sequence,
        snapshot: SaveSnapshot,
        yield_to_loads: Callable[[], None],
    ) -> StoredPrefix | None:
        """Save the whole chunks of a running sequence's snapshot; return the stored prefix.

        None if a value is not finite. The check is needed because the sampler has not yet checked the tokens' logits.
        """
        table, pool, stored = snapshot.table, snapshot.pool, snapshot.stored
        if stored.tokens < table.first_valid_token:
            return stored
        slots = torch.from_numpy(table.slots(stored.tokens, snapshot.tokens))
        if not pool.values[-1].index_select(1, slots.to(pool.values.device)).isfinite().all():
            return None
        return self.save(session, root, sequence, snapshot, yield_to_loads)


class _SnapshotSource:
    """Source of a snapshot's chunks for ``store_chunks``. It omits chunks that end behind the snapshot's tokens."""

    def __init__(
        self,
        context: ClientContext,
        max_chunk_tokens: int,
        snapshot: SaveSnapshot,
        yield_to_loads: Callable[[], None],
    ) -> None:
        self._context, self._max_chunk_tokens = context, max_chunk_tokens
        self._snapshot, self.before_group = snapshot, yield_to_loads

    def headers(self, start: int) -> list[ChunkHeader]:
        """Build the headers of the chunks from ``start`` on, none longer than the daemon's limit."""
        context, snapshot = self._context, self._snapshot
        per_token = context.cost_model.seconds_per_token(*snapshot.prefill)
        headers = list[ChunkHeader]()
        for end in context.policy.chunker.ends(snapshot.known, snapshot.marks):
            while start < end <= snapshot.tokens:
                stop = min(end, start + self._max_chunk_tokens)
                header = new_header(context.geometry, snapshot.known[start:stop], start)
                header.prefill_seconds = per_token * (stop - start)
                headers.append(header)
                start = stop
        return headers

    def fill(self, header: ChunkHeader, payload: memoryview) -> None:
        start, pool = header.start_position, self._snapshot.pool
        slots = torch.from_numpy(self._snapshot.table.slots(start, start + header.token_count))
        pack_chunk(pool.keys, pool.values, slots, header, payload)
        self._context.stats.stored_bytes += payload.nbytes

    def after_group(self, result: WriteResult) -> None:
        self._context.stats.stored_chunks += sum(result.newly_stored)
        self._context.stats.refused_chunks += result.stored.count(False)


def _prefill(sequence: Sequence) -> tuple[int, float]:
    """Number of computed prompt tokens, and the seconds of their prefill."""
    return sequence.request.num_prompt_tokens - sequence.usage.num_cached, sequence.timings.prefill_ms / 1e3
