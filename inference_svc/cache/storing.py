"""Storing: from the pool into staging, and from there into the daemon's arena by Commit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvkernels import pack_chunk
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.layout import Geometry, new_header
from kvsidecar.paged.session import Session
from kvsidecar.paged.writing import group_length

from inference_svc.cache.economy import Economy
from inference_svc.cache.loading import marks_of
from inference_svc.engine.pool import KVPool
from inference_svc.engine.sequence import Sequence, StoredPrefix
from inference_svc.reuse.policy import ReusePolicy


@dataclass
class CacheStats:
    """Counters since the start."""

    failures: int = 0
    stored_chunks: int = 0
    refused_chunks: int = 0


class Storing:
    """``timeout`` is in seconds, for a call that moves nothing."""

    def __init__(
        self, geometry: Geometry, policy: ReusePolicy, economy: Economy, stats: CacheStats, timeout: float
    ) -> None:
        self._geometry, self._policy, self._economy = geometry, policy, economy
        self._stats, self._timeout = stats, timeout

    def save(self, session: Session, root: bytes, sequence: Sequence, pool: KVPool) -> StoredPrefix:
        """Stores what of a finished sequence is not stored yet. Returns what is stored then."""
        stored = self._save_from(session, root, sequence, pool, sequence.stored)
        if stored is None:  # the parent was evicted or superseded meanwhile: the pool still has it all
            stored = self._save_from(session, root, sequence, pool, StoredPrefix())
        return stored or StoredPrefix()

    def _save_from(
        self, session: Session, root: bytes, sequence: Sequence, pool: KVPool, prefix: StoredPrefix
    ) -> StoredPrefix | None:
        """Stores the tokens after ``prefix``. Returns what is stored, or None when its last chunk is gone."""
        headers = self._headers(sequence, prefix, session.max_chunk_tokens)
        parent, stored = prefix.prefix_hash, prefix
        first = True
        while headers:
            group = headers[: group_length(session, headers)]
            headers, hashes = headers[len(group) :], []
            for header in group:
                header.parent_prefix_hash = parent
                parent = keys.prefix_hash(parent or root, header.token_ids)
                hashes.append(parent)
            request = pb.ReserveRequest(session_id=session.id, tenant_salt=sequence.cache.tenant_salt, headers=group)
            reserved = session.stub.Reserve(request, timeout=self._timeout * 4).reservations
            if first and reserved[0].outcome == pb.RESERVE_OUTCOME_PARENT_MISSING:
                return None
            first = False
            chunks = self._write(session, sequence, pool, group, list(reserved))
            if chunks:
                tokens = stored.tokens + sum(h.token_count for h in group[:chunks])
                before, stored = stored, StoredPrefix(tokens, hashes[chunks - 1], tokens)
                if session.remote and not headers and chunks == len(group):
                    stored = _without_tail(before, group, hashes)
            if chunks < len(group):
                break
        return stored

    def _headers(self, sequence: Sequence, prefix: StoredPrefix, most_tokens: int) -> list[ChunkHeader]:
        """Headers of the chunks to store after ``prefix``, with the tail; none longer than the daemon takes."""
        fresh = sequence.prompt_tokens - sequence.cached_tokens
        per_token = self._economy.seconds_per_token(fresh, sequence.timings.prefill_ms / 1e3)
        headers, start = list[ChunkHeader](), prefix.tokens
        for end in self._policy.chunker.ends(sequence.tokens[: sequence.reusable], marks_of(sequence)):
            while start < end:
                stop = min(end, start + most_tokens)
                header = new_header(self._geometry, sequence.tokens[start:stop], start)
                header.prefill_seconds = per_token * (stop - start)
                headers.append(header)
                start = stop
        return headers

    def _write(
        self,
        session: Session,
        sequence: Sequence,
        pool: KVPool,
        headers: list[ChunkHeader],
        reserved: list[pb.Reservation],
    ) -> int:
        """Fills what was granted and commits it. Returns how many leading chunks of the group are stored."""
        granted = {r.reservation_id: h for h, r in zip(headers, reserved, strict=True) if r.reservation_id}
        try:
            items = [
                self._fill(session, sequence, pool, granted[r.reservation_id], r) for r in reserved if r.reservation_id
            ]
        except Exception:
            session.stub.Abort(pb.AbortRequest(session_id=session.id, reservation_ids=granted), timeout=self._timeout)
            raise
        outcomes: dict[bytes, int] = {}
        if items:
            request = pb.CommitRequest(session_id=session.id, epoch=session.epoch, items=items)
            answer = session.stub.Commit(request, timeout=self._timeout * 10)
            outcomes = {item.reservation_id: o for item, o in zip(items, answer.outcomes, strict=True)}
        stored, unbroken = 0, True
        for reservation in reserved:
            fresh = outcomes.get(reservation.reservation_id) == pb.COMMIT_OUTCOME_COMMITTED
            known = reservation.outcome == pb.RESERVE_OUTCOME_ALREADY_STORED
            self._stats.stored_chunks += fresh
            self._stats.refused_chunks += not (fresh or known)
            unbroken = unbroken and (fresh or known)
            stored += unbroken
        return stored

    @staticmethod
    def _fill(
        session: Session, sequence: Sequence, pool: KVPool, header: ChunkHeader, reservation: pb.Reservation
    ) -> pb.CommitItem:
        assert sequence.table is not None
        payload, start = session.staged(reservation.staging), header.start_position
        slots = torch.from_numpy(sequence.table.slots(start, start + header.token_count))
        pack_chunk(pool.keys, pool.values, slots, header, payload)
        return pb.CommitItem(reservation_id=reservation.reservation_id, checksum=keys.checksum(payload))


def _without_tail(before: StoredPrefix, group: list[ChunkHeader], hashes: list[bytes]) -> StoredPrefix:
    """What is stored when all of a last group is, with storing to go on before its last chunk: that ends where the
    sequence does, and nowhere that another node would cut. What goes on from there takes its place."""
    tail = group[-1].start_position
    last = hashes[-2] if len(hashes) > 1 else before.prefix_hash
    return StoredPrefix(tail, last, tail + group[-1].token_count)
