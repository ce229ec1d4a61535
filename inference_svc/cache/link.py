"""Loads sequences from the daemon's arena into the pool, and stores finished ones.

One thread does both, in order: what a finished request stores is there for the next turn of its conversation.
Nothing here fails a request: whatever goes wrong is counted, logged once, and the prompt is computed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import grpc
import structlog
import torch
from kvkernels import Payload, pack_chunk, unpack_chunk
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import KVSidecarError, from_rpc
from kvsidecar.layout import SINK_TOKENS, Geometry, layout_of, new_header
from torch import Tensor

from inference_svc.cache.economy import Economy
from inference_svc.cache.session import DaemonLink, Session
from inference_svc.engine.gate import LayerGate
from inference_svc.engine.pool import KVPool
from inference_svc.engine.sequence import Sequence, State, StoredPrefix
from inference_svc.reuse.chunking import Marks
from inference_svc.reuse.placement import Rotation
from inference_svc.reuse.plan import Plan, Stretch
from inference_svc.reuse.policy import RepairSetting, ReusePolicy
from inference_svc.reuse.strategies.base import cost

log = structlog.get_logger("cache")

Done = Callable[[Sequence, int], None]
# A sequence's chunks are written in groups of this many, so that a long one does not wait for its last chunk.
_GROUP = 32
# With a prefix in the pool already, the daemon is asked only when at least this many tokens are missing.
_LEAST_MISSING = 64
# Shorter chunks are not worth a seam.
_LEAST_PLACED = 8
# From so many tokens on, the forward begins when the first layers are there; layers are copied so many at a time.
_LAYERWISE_TOKENS, _LAYER_GROUP = 512, 8


@dataclass(frozen=True)
class _Piece:
    """A chunk to be copied to ``slots [tokens]`` of the pool."""

    header: ChunkHeader
    payload: Payload
    slots: Tensor
    rotation: Rotation | None


@dataclass
class CacheStats:
    """Counters since the start."""

    failures: int = 0
    stored_chunks: int = 0
    refused_chunks: int = 0


class CacheLink:
    """The engine's ``Cache`` over a daemon."""

    def __init__(
        self, daemon: DaemonLink, geometry: Geometry, policy: ReusePolicy, projection_share: float, timeout: float
    ) -> None:
        self.stats = CacheStats()
        self._daemon, self._geometry, self._policy = daemon, geometry, policy
        self._projection_share = projection_share
        self._timeout = timeout
        self._economy = Economy()
        self._thread = ThreadPoolExecutor(1, "kv-io")
        self._releases: set[Any] = set()

    @property
    def attached(self) -> bool:
        return self._daemon.session is not None

    def close(self) -> None:
        """Finishes what is queued and ends the session. Blocks."""
        self._thread.shutdown()
        self._daemon.close()

    def warm_up(self, pool: KVPool) -> None:
        """Compiles the chunk kernels before the first request needs them. Writes only to the padding slots."""
        header = new_header(self._geometry, [0] * 8, 0)
        payload = memoryview(bytearray(header.payload_bytes))
        slots = torch.arange(pool.padding_slot, pool.padding_slot + 8)
        pack_chunk(pool.keys, pool.values, slots, header, payload)
        unpack_chunk(pool.keys, pool.values, slots, header, payload)

    # ---- loading --------------------------------------------------------------------------------------------

    def load(self, sequence: Sequence, pool: KVPool, done: Done) -> bool:
        # Of few missing tokens, fewer still would be found: the question alone costs as much as they do.
        least = 2 if not sequence.computed else _LEAST_MISSING
        session = self._daemon.session
        if session is None or sequence.missing < least or not self._economy.worth_loading(sequence.missing):
            return False
        if not self._places(session, sequence) and self._in_vain(session, sequence):
            return False
        self._thread.submit(self._guarded_load, sequence, pool, done)
        return True

    def _root(self, sequence: Sequence) -> bytes:
        return keys.tenant_root(self._daemon.namespace, sequence.cache.tenant_salt)

    def _in_vain(self, session: Session, sequence: Sequence) -> bool:
        """Whether the daemon need not be asked for a prompt's beginning; counted for it."""
        if session.may_hold(self._root(sequence), sequence.tokens):
            return False
        session.skipped(len(sequence.tokens))
        return True

    def probe(self, sequence: Sequence) -> None:
        session = self._daemon.session
        if session is None or not sequence.cache.read:
            return
        if session.may_hold(self._root(sequence), sequence.tokens):
            self._thread.submit(self._probe, sequence)

    def _probe(self, sequence: Sequence) -> None:
        """A Match without a session: nothing is leased. A failure is left to the load that follows."""
        session = self._daemon.session
        if session is None or sequence.state is not State.WAITING:
            return
        request = pb.MatchRequest(
            tenant_salt=sequence.cache.tenant_salt,
            token_ids=sequence.tokens,
            namespace=self._daemon.namespace,
        )
        with contextlib.suppress(grpc.RpcError):
            sequence.expected_cached = session.stub.Match(request, timeout=self._timeout).matched_tokens

    def _load(self, session: Session, sequence: Sequence, pool: KVPool, done: Done) -> None:
        """Looks a prompt up and copies what is found, layers in order: ``done`` is told as soon as the first ones are
        there, and the sequence's gate opens for the others as they come."""
        began = time.perf_counter()
        contents = self._probes(session, sequence)
        if not contents and self._in_vain(session, sequence):
            done(sequence, 0)
            return
        request = pb.MatchRequest(
            session_id=session.id,
            tenant_salt=sequence.cache.tenant_salt,
            token_ids=sequence.tokens,
            contents=contents,
        )
        found = session.stub.Match(request, timeout=self._timeout)
        looked_up = time.perf_counter()
        gate: LayerGate | None = None
        try:
            pieces, tokens = self._prefix_pieces(session, sequence, pool, found.matches)
            exact = max(tokens, sequence.computed)
            repair = self._policy.repair_for(session.verdict)
            placed, stretches = (
                self._content_pieces(session, sequence, pool, found.contents, exact)
                if repair is not None and self._pays(repair)
                else ([], [])
            )
            pieces += placed
            if stretches:
                sequence.repair = repair
                sequence.plan = Plan(len(sequence.tokens), exact, tuple(stretches))
            stored = _stored_prefix(found.matches)
            if stored.covered >= sequence.stored.covered:
                sequence.stored = stored
            sequence.timings.lookup_ms += (looked_up - began) * 1e3
            sequence.timings.transfer_ms += found.promote_ms
            layers = self._geometry.layers
            restored = sum(len(piece.slots) for piece in pieces)
            if restored >= _LAYERWISE_TOKENS:
                gate = sequence.gate = LayerGate(layers)
                done(sequence, tokens)
            group = _LAYER_GROUP if gate else layers
            for first in range(0, layers, group):
                part = range(first, min(first + group, layers))
                for piece in pieces:
                    unpack_chunk(pool.keys, pool.values, piece.slots, piece.header, piece.payload, piece.rotation, part)
                if not session.trusted:
                    raise ConnectionError("the session ended while chunks were copied")
                if gate:
                    gate.open(part.stop)
        finally:
            if gate:
                gate.fail()
            self._release(session, [m.lease_id for m in [*found.matches, *(c.match for c in found.contents)]])
        ended = time.perf_counter()
        sequence.timings.restore_ms += (ended - looked_up) * 1e3
        self._economy.loaded(restored, ended - began)
        if not gate:
            done(sequence, tokens)

    def _prefix_pieces(
        self, session: Session, sequence: Sequence, pool: KVPool, matches: Any
    ) -> tuple[list[_Piece], int]:
        """The chunks of the longest stored prefix, and how many tokens it has."""
        # The last token is always computed: its logits are wanted.
        most = len(sequence.tokens) - 1
        out: list[_Piece] = []
        tokens = 0
        assert sequence.table is not None
        for match in matches:
            take = min(match.matched_tokens, most - tokens)
            if take <= 0:
                break
            if match.header.start_position != tokens:
                raise ValueError(f"a chunk at {match.header.start_position} does not continue {tokens} tokens")
            if tokens + take > sequence.computed:
                slots = torch.from_numpy(sequence.table.slots(tokens, tokens + take))
                # What the pool has already stays as it is; others may be reading it.
                slots[: max(0, sequence.computed - tokens)] = pool.padding_slot
                out.append(self._piece(session, match, slots, None))
            tokens += take
        return out, tokens

    def _piece(self, session: Session, match: pb.ChunkMatch, slots: Tensor, rotation: Rotation | None) -> _Piece:
        header = match.header
        if Geometry.of(header) != self._geometry:
            raise ValueError(f"a chunk of {Geometry.of(header)} in a worker of {self._geometry}")
        if match.slot.size_bytes != layout_of(header).size_bytes:
            raise ValueError(f"a slot of {match.slot.size_bytes} bytes does not hold its chunk")
        return _Piece(header, session.payload(match.slot), slots, rotation)

    def _probes(self, session: Session, sequence: Sequence) -> list[pb.ContentProbe]:
        """The chunks of a prompt that might have been read elsewhere, where such may be reused."""
        if not self._places(session, sequence):
            return []
        # The last token is always computed.
        tokens, root = sequence.tokens[:-1], self._root(sequence)
        return [
            pb.ContentProbe(start=a, tokens=b - a)
            for a, b in pairwise([0, *self._policy.chunker.ends(tokens, self._marks(sequence))])
            if b > sequence.computed and b - a >= _LEAST_PLACED and session.may_hold_content(root, tokens[a:b])
        ]

    def _places(self, session: Session, sequence: Sequence) -> bool:
        """Whether what was read in another context may be reused."""
        return not sequence.cache.exact_only and self._policy.repair_for(session.verdict) is not None

    @staticmethod
    def _marks(sequence: Sequence) -> Marks:
        """The request's marks, and one where its prompt ends: the answer is no part of the last document."""
        marks = sequence.cache.marks
        return replace(marks, segment_ends=(*marks.segment_ends, sequence.prompt_tokens))

    def _content_pieces(
        self, session: Session, sequence: Sequence, pool: KVPool, contents: Any, exact: int
    ) -> tuple[list[_Piece], list[Stretch]]:
        """Chunks that were found by content, keys turned to where the prompt has them."""
        assert sequence.table is not None
        out: list[_Piece] = []
        stretches: list[Stretch] = []
        for found in contents:
            header = found.match.header
            end = found.start + len(header.token_ids)
            # The first tokens of all attract attention whatever they say; elsewhere they must not.
            start = max(found.start + (SINK_TOKENS if header.start_position == 0 else 0), exact)
            if end - start < _LEAST_PLACED:
                continue
            slots = torch.from_numpy(sequence.table.slots(found.start, end))
            slots[: start - found.start] = pool.padding_slot
            delta = found.start - header.start_position
            assert self._policy.rotary is not None
            rotation = self._policy.rotary.by(delta) if delta else None
            out.append(self._piece(session, found.match, slots, rotation))
            stretches.append(Stretch(start, end))
        return out, stretches

    def _pays(self, chosen: RepairSetting) -> bool:
        """Whether loading and repairing a token is cheaper than computing it; not asked when the operator insists."""
        share = cost(chosen.repair, chosen.ratio, self._geometry.layers, self._projection_share)
        return self._policy.mode == "always" or self._economy.worth_placing(share)

    def _release(self, session: Session, leases: list[bytes]) -> None:
        """Gives leases back without waiting for the answer."""
        if leases:
            request = pb.ReleaseRequest(session_id=session.id, lease_ids=leases)
            call = session.stub.Release.future(request, timeout=5.0)
            # A call nobody refers to is cancelled, and its leases would stay until the session ends.
            self._releases.add(call)
            call.add_done_callback(self._releases.discard)

    # ---- storing --------------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, pool: KVPool, done: Done) -> bool:
        if sequence.plan is None:
            computed = sequence.prompt_tokens - sequence.cached_tokens
            self._economy.prefilled(computed, sequence.timings.prefill_ms / 1e3)
        if self._daemon.session is None or sequence.reusable <= sequence.stored.covered:
            return False
        self._thread.submit(self._guarded_save, sequence, pool, done)
        return True

    def _save(self, session: Session, sequence: Sequence, pool: KVPool) -> int:
        stored = self._save_from(session, sequence, pool, sequence.stored)
        if stored is None:  # the parent was evicted meanwhile: the pool still has it all
            stored = self._save_from(session, sequence, pool, StoredPrefix())
        return stored or 0

    def _save_from(self, session: Session, sequence: Sequence, pool: KVPool, prefix: StoredPrefix) -> int | None:
        """Stores the tokens after ``prefix``. Returns the tokens stored, or None when its last chunk is gone."""
        headers = self._headers(sequence, prefix)
        root = self._root(sequence)
        parent, stored = prefix.prefix_hash, prefix
        for at in range(0, len(headers), _GROUP):
            group, hashes = headers[at : at + _GROUP], []
            for header in group:
                header.parent_prefix_hash = parent
                parent = keys.prefix_hash(parent or root, header.token_ids)
                hashes.append(parent)
            request = pb.ReserveRequest(session_id=session.id, tenant_salt=sequence.cache.tenant_salt, headers=group)
            reserved = session.stub.Reserve(request, timeout=self._timeout * 4).reservations
            if at == 0 and reserved[0].outcome == pb.RESERVE_OUTCOME_PARENT_MISSING:
                return None
            chunks = self._write(session, sequence, pool, group, list(reserved))
            if chunks:
                tokens = stored.tokens + sum(len(h.token_ids) for h in group[:chunks])
                stored = StoredPrefix(tokens, hashes[chunks - 1], tokens)
            if chunks < len(group):
                break
        sequence.stored = stored
        return stored.tokens

    def _headers(self, sequence: Sequence, prefix: StoredPrefix) -> list[ChunkHeader]:
        """Headers of the chunks to store after ``prefix``, with the tail."""
        fresh = max(1, sequence.prompt_tokens - sequence.cached_tokens)
        per_token = sequence.timings.prefill_ms / 1e3 / fresh
        headers, start = [], prefix.tokens
        for end in self._policy.chunker.ends(sequence.tokens[: sequence.reusable], self._marks(sequence)):
            if end > start:
                header = new_header(self._geometry, sequence.tokens[start:end], start)
                header.prefill_seconds = per_token * (end - start)
                headers.append(header)
                start = end
        return headers

    def _write(
        self,
        session: Session,
        sequence: Sequence,
        pool: KVPool,
        headers: list[ChunkHeader],
        reserved: list[pb.Reservation],
    ) -> int:
        """Fills the granted slots and commits them. Returns how many leading chunks of the group are stored."""
        assert sequence.table is not None
        items, stored, unbroken = [], 0, True
        for header, reservation in zip(headers, reserved, strict=True):
            count = len(header.token_ids)
            if reservation.outcome == pb.RESERVE_OUTCOME_GRANTED:
                payload = session.payload(reservation.slot)
                start = header.start_position
                slots = torch.from_numpy(sequence.table.slots(start, start + count))
                pack_chunk(pool.keys, pool.values, slots, header, payload)
                items.append(
                    pb.CommitItem(
                        lease_id=reservation.lease_id, checksum=session.checksum(payload), epoch=session.epoch
                    )
                )
                self.stats.stored_chunks += 1
            elif reservation.outcome != pb.RESERVE_OUTCOME_ALREADY_STORED:
                self.stats.refused_chunks += 1
                unbroken = False
            stored += unbroken
        if items:
            session.stub.Commit(pb.CommitRequest(session_id=session.id, items=items), timeout=self._timeout * 10)
        return stored

    # ---- failing --------------------------------------------------------------------------------------------

    def _guarded_load(self, sequence: Sequence, pool: KVPool, done: Done) -> None:
        told = False

        def tell(loaded: Sequence, tokens: int) -> None:
            nonlocal told
            told = True
            done(loaded, tokens)

        with self._guard(sequence) as session:
            if session is not None:
                self._load(session, sequence, pool, tell)
        if not told:
            sequence.plan = None
            done(sequence, 0)

    def _guarded_save(self, sequence: Sequence, pool: KVPool, done: Done) -> None:
        tokens = 0
        with self._guard(sequence) as session:
            if session is not None:
                tokens = self._save(session, sequence, pool)
        done(sequence, tokens)

    @contextlib.contextmanager
    def _guard(self, sequence: Sequence) -> Iterator[Session | None]:
        """The session, if there is one; any failure with it ends it and counts, and the request goes on without."""
        session = self._daemon.session
        try:
            yield session
        except (grpc.RpcError, KVSidecarError, ConnectionError, ValueError) as error:
            text = str(from_rpc(error)) if isinstance(error, grpc.RpcError) else str(error)
            self._give_up(session)
            log.warning("cache failed, computing instead", request=sequence.id, error=text)
        except Exception:
            self._give_up(session)
            log.exception("cache failed, computing instead", request=sequence.id)

    def _give_up(self, session: Session | None) -> None:
        self.stats.failures += 1
        if session is not None:
            self._daemon.drop(session)


def _stored_prefix(matches: Any) -> StoredPrefix:
    """Where storing goes on: after the last chunk that matched wholly."""
    tokens, last, covered = 0, b"", 0
    for match in matches:
        covered += match.matched_tokens
        if match.matched_tokens == len(match.header.token_ids):
            tokens, last = covered, match.header.prefix_hash
    return StoredPrefix(tokens, last, covered)
