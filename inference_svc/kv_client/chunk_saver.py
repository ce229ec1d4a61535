"""Storing: from the pool to the daemon, which makes chunks visible by Commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kvkernels import pack_chunk
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.kv_transfer.chunk_writer import linked_groups, write
from kvsidecar.kv_transfer.session import Session
from kvsidecar.kv_transfer.transport import Fill

from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.kv_client.cache_stats import CacheStats
from inference_svc.kv_client.chunk_loader import document_marks
from inference_svc.kv_client.load_cost_model import LoadCostModel
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.sequence import Sequence


@dataclass(frozen=True)
class PartialSave:
    """The first ``tokens`` tokens of a running sequence, of which ``stored`` is stored. ``table`` holds the pages
    behind that, ``known`` are all of its tokens so far, ``prefill`` what was computed of them in how many seconds."""

    pool: KVPool
    table: BlockTable
    tokens: int
    stored: StoredPrefix
    known: list[int]
    prefill: tuple[int, float]

    @classmethod
    def snapshot(cls, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int) -> PartialSave:
        """As the engine's thread sees it now."""
        fresh, seconds = _prefill(sequence)
        if not sequence.timestamps.first_token_at:
            fresh, seconds = (
                sequence.kv.num_computed - sequence.usage.num_cached,
                time.perf_counter() - sequence.timestamps.started_at,
            )
        return cls(pool, table, tokens, sequence.kv.stored, list(sequence.tokens), (fresh, seconds))


@dataclass(frozen=True)
class _Job:
    """What is stored: of the tokens ``known``, the chunks that end at ``end`` or before, from ``table``'s pages."""

    session: Session
    root: bytes
    sequence: Sequence
    pool: KVPool
    table: BlockTable
    known: list[int]
    end: int
    prefill: tuple[int, float]
    yield_to_loads: Callable[[], None]


class ChunkSaver:
    """``timeout`` is in seconds, for a call that moves nothing. Each group of chunks waits for ``give_way``, which the
    caller gives, first."""

    def __init__(
        self, geometry: Geometry, policy: ReusePolicy, economy: LoadCostModel, stats: CacheStats, timeout: float
    ) -> None:
        self._geometry, self._policy, self._cost_model = geometry, policy, economy
        self._stats, self._timeout = stats, timeout

    def save(
        self, session: Session, root: bytes, sequence: Sequence, pool: KVPool, give_way: Callable[[], None]
    ) -> StoredPrefix:
        """Stores what of a finished sequence is not stored yet. Returns what is stored then."""
        assert sequence.kv.table is not None
        known = sequence.tokens[: sequence.kv.num_exact]
        job = _Job(session, root, sequence, pool, sequence.kv.table, known, len(known), _prefill(sequence), give_way)
        return self._save(job, sequence.kv.stored)

    def save_part(
        self, session: Session, root: bytes, sequence: Sequence, part: PartialSave, give_way: Callable[[], None]
    ) -> StoredPrefix | None:
        """Stores the chunks of a running sequence that end within a part of it. Returns what is stored then; None for
        values that are not finite, of which no answer has told yet."""
        table, pool = part.table, part.pool
        if part.stored.tokens < table.first_valid_token:  # nobody could find it without what comes before
            return part.stored
        slots = torch.from_numpy(table.slots(part.stored.tokens, part.tokens))
        if not pool.values[-1].index_select(1, slots.to(pool.values.device)).isfinite().all():
            return None
        job = _Job(session, root, sequence, pool, table, part.known, part.tokens, part.prefill, give_way)
        return self._save(job, part.stored)

    def _save(self, job: _Job, before: StoredPrefix) -> StoredPrefix:
        stored = self._save_from(job, before) if job.table.first_valid_token <= before.tokens else before
        if (
            stored is None and not job.table.first_valid_token
        ):  # the parent is gone meanwhile: the pool still has it all
            stored = self._save_from(job, StoredPrefix())
        return stored or StoredPrefix()

    def _save_from(self, job: _Job, prefix: StoredPrefix) -> StoredPrefix | None:
        """Stores the tokens after ``prefix``. Returns what is stored, or None when its last chunk is gone."""
        session, root, sequence = job.session, job.root, job.sequence
        headers, stored, first = self._headers(job, prefix), prefix, True
        for group, hashes in linked_groups(session, headers, prefix.prefix_hash, root):
            job.yield_to_loads()
            filler = _filler(job, group)
            cache = sequence.request.cache
            written = write(session, cache.tenant_salt, group, filler, self._timeout, cache.ttl_seconds)
            if first and written.parent_missing:
                return None
            first = False
            self._stats.stored_chunks += sum(written.newly_stored)
            self._stats.refused_chunks += written.stored.count(False)
            chunks = written.num_leading_stored
            if chunks:
                tokens = stored.tokens + sum(h.token_count for h in group[:chunks])
                before, stored = stored, StoredPrefix(tokens, hashes[chunks - 1], tokens)
                if session.remote and chunks == len(group) and tokens == len(job.known):
                    stored = _without_tail(before, group, hashes)
            if chunks < len(group):
                break
        return stored

    def _headers(self, job: _Job, prefix: StoredPrefix) -> list[ChunkHeader]:
        """Headers of the chunks to store after ``prefix``, with the tail; none longer than the daemon takes."""
        per_token = self._cost_model.seconds_per_token(*job.prefill)
        headers, start = list[ChunkHeader](), prefix.tokens
        for end in self._policy.chunker.ends(job.known, document_marks(job.sequence)):
            while start < end <= job.end:
                stop = min(end, start + job.session.max_chunk_tokens)
                header = new_header(self._geometry, job.known[start:stop], start)
                header.prefill_seconds = per_token * (stop - start)
                headers.append(header)
                start = stop
        return headers


def _filler(job: _Job, headers: list[ChunkHeader]) -> Fill:
    """Writes the payloads of a sequence's chunks from the pool."""

    def fill(i: int, payload: memoryview) -> None:
        start = headers[i].start_position
        slots = torch.from_numpy(job.table.slots(start, start + headers[i].token_count))
        pack_chunk(job.pool.keys, job.pool.values, slots, headers[i], payload)

    return fill


def _prefill(sequence: Sequence) -> tuple[int, float]:
    """How many tokens of its prompt were computed, in how many seconds."""
    return sequence.request.num_prompt_tokens - sequence.usage.num_cached, sequence.timings.prefill_ms / 1e3


def _without_tail(before: StoredPrefix, group: list[ChunkHeader], hashes: list[bytes]) -> StoredPrefix:
    """What is stored when all of a last group is, with storing to go on before its last chunk: that ends where the
    sequence does, and nowhere that another node would cut. What goes on from there takes its place."""
    tail = group[-1].start_position
    last = hashes[-2] if len(hashes) > 1 else before.prefix_hash
    return StoredPrefix(tail, last, tail + group[-1].token_count)
