"""Loading: from the daemon into the pool, what of a prompt was read before."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import grpc
import torch
from kvkernels import Piece
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import MAX_CUTS, SINK_TOKENS, Geometry
from kvsidecar.kv_transfer.prefix_lookup import header_of
from kvsidecar.kv_transfer.session import Session
from torch import Tensor

from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.context_reuse.reuse_plan import RelocatedSpan, ReusePlan
from inference_svc.context_reuse.reuse_policy import RecomputeSetting, ReusePolicy
from inference_svc.context_reuse.rope_shift import Rotation
from inference_svc.context_reuse.selectors.selector import recompute_cost
from inference_svc.kv_client.cache_stats import CacheStats
from inference_svc.kv_client.load_cost_model import LoadCostModel
from inference_svc.kv_client.sequence_load import SequenceLoad
from inference_svc.kv_client.window_plan import WindowPlan, load_layers, plan_window
from inference_svc.kv_pool.block_table import UNMAPPED
from inference_svc.kv_pool.kv_pool import WINDOW_STEP, KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.sequence.kv_connector import LoadResult
from inference_svc.sequence.sequence import Sequence

# Shorter chunks are not worth a seam.
_MIN_RELOCATED_TOKENS = 8
# From so many tokens on, the forward begins when the first layers are there; layers are copied so many at a time.
_MIN_LAYERWISE_TOKENS, _LAYER_GROUP = 512, 8
# What is cold comes from a disk: a call may take so much longer for each byte that it may have to bring in.
_DISK_BYTES_PER_SECOND = 200e6
# The daemon waits no longer for a remote tier.
_MAX_REMOTE_SECONDS = 10.0


@dataclass(frozen=True)
class ChunkCopy:
    """A leased chunk, the slots of its leading tokens, and by how much its keys are turned. Of a ``far`` one, only
    layers without a window get them."""

    match: pb.ChunkMatch
    slots: Tensor
    rotation: Rotation | None = None
    global_layers_only: bool = False

    @property
    def size_bytes(self) -> int:
        """Of its payload, what belongs to these tokens."""
        return self.match.payload_bytes * len(self.slots) // self.match.tokens


@dataclass(frozen=True)
class LoadPlan:
    """Leased chunks to copy for a load, and what the engine is told when they are there. ``asked_seconds`` is what the
    question took here, without the remote tier."""

    lease_id: bytes
    copies: tuple[ChunkCopy, ...]
    restored: LoadResult
    lookup_seconds: float


class ChunkLoader:
    """``timeout`` is in seconds, for a prompt of no length."""

    def __init__(
        self,
        geometry: Geometry,
        policy: ReusePolicy,
        economy: LoadCostModel,
        stats: CacheStats,
        projection_share: float,
        timeout: float,
    ) -> None:
        self._geometry, self._policy, self._cost_model, self._stats = geometry, policy, economy, stats
        self._projection_share, self._timeout = projection_share, timeout
        self._counting = threading.Lock()
        g = geometry
        self._token_bytes = 4 * g.layers * g.kv_heads * g.head_dim * g.bits / 8  # roughly: keys and values

    def skips_lookup(self, session: Session, root: bytes, sequence: Sequence) -> bool:
        """Whether the daemon need not be asked for a prompt's beginning; counted for it. Others may have read what the
        summary knows nothing of."""
        if session.remote or session.may_contain(root, sequence.tokens):
            return False
        with self._counting:
            session.count_skipped_lookup(len(sequence.tokens))
        return True

    def allows_relocation(self, session: Session, sequence: Sequence) -> bool:
        """Whether what was read in another context may be reused. Not where a window's pages do not reach so far."""
        table = sequence.kv.table  # the engine may take the pages of a load back that nobody wants any more
        if table is not None and table.tokens < len(sequence.tokens):
            return False
        return not sequence.request.cache.exact_only and self._policy.recompute_setting(session.verdict) is not None

    def look_up(self, session: Session, root: bytes, load: SequenceLoad) -> LoadPlan | None:
        """Looks a prompt up and chooses what is to be copied. None where nothing is: the engine was told then, or is to
        be. The sequence stays as it is. Any thread may call it, for several loads at once."""
        began, sequence = time.perf_counter(), load.sequence
        contents = self._content_probes(session, root, sequence, sequence.tokens)
        if not contents and self.skips_lookup(session, root, sequence):
            return None
        cuts = self._chunk_ends(session, sequence)
        request = pb.MatchRequest(
            session_id=session.id,
            tenant_salt=sequence.request.cache.tenant_salt,
            token_ids=sequence.tokens,
            contents=contents,
            cuts=cuts,
            seconds_per_token=self._cost_model.prefill_seconds_per_token,
            ttl_seconds=sequence.request.cache.ttl_seconds,
            window=0 if session.remote or not load.pool.window else load.pool.window + WINDOW_STEP,
        )
        with sequence.trace.part("lookup", sequence.timestamps.admitted_at):
            answer = session.match(request, self._match_timeout(session, len(sequence.tokens)))
        looked_up = time.perf_counter()
        found: LoadPlan | None = None
        try:
            if answer.epoch != session.epoch:
                raise ValueError(f"an answer of epoch {answer.epoch:x} in a session of epoch {session.epoch:x}")
            if load.claim():
                # The prompt's own end is no cut.
                found = self._plan_load(session, load, answer, cuts[:-1] if session.remote else None, began, looked_up)
        finally:
            if found is None or not found.copies:
                session.release([answer.lease_id])
        if found is None or found.copies:
            return found
        load.report(found.restored)
        return None

    def _plan_load(
        self,
        session: Session,
        load: SequenceLoad,
        answer: pb.MatchResponse,
        cuts: list[int] | None,
        began: float,
        looked_up: float,
    ) -> LoadPlan:
        """What of an answer is copied, and what the engine is told of it."""
        sequence, pool = load.sequence, load.pool
        stored = _stored_prefix(answer.passed_tokens, answer.matches, cuts)
        use = self._plan_window(sequence, pool, answer, stored)
        parts = self._prefix_copies(sequence, pool, answer.matches, use)
        exact = max(use.tokens, sequence.kv.num_computed)
        repair = self._policy.recompute_setting(session.verdict)
        placed, stretches = (
            self._relocated_copies(sequence, pool, answer.contents, exact)
            if repair is not None and self._relocation_pays(repair)
            else ([], [])
        )
        parts += placed
        restored = LoadResult(
            tokens=use.tokens,
            table=use.table,
            plan=ReusePlan(len(sequence.tokens), exact, tuple(stretches)) if stretches else None,
            repair=repair if stretches else None,
            stored=stored,
            lookup_ms=(looked_up - began) * 1e3,
            transfer_ms=answer.promote_ms,
            looked_up_at=looked_up,
        )
        # What the remote tier takes, the daemon weighs: it knows what that has, and was told what computing takes.
        return LoadPlan(answer.lease_id, tuple(parts), restored, looked_up - began - answer.remote_ms / 1e3)

    def copy(self, session: Session, found: LoadPlan, load: SequenceLoad) -> None:
        """Copies what was found, layers in order. Of much, the engine is told before the first ones are there, with a
        gate that opens as they come. It is not told of what was not copied."""
        began, parts, pool = time.perf_counter(), found.copies, load.pool
        layers, gate = self._geometry.layers, None
        shares = [len(pool.wide_layers) / layers if part.global_layers_only else 1.0 for part in parts]
        copied = int(sum(len(part.slots) * share for part, share in zip(parts, shares, strict=True)))
        try:
            if not load.wanted:
                return
            if copied >= _MIN_LAYERWISE_TOKENS and session.transport.zero_copy:
                gate = LayerReadyEvent(layers)
                load.report(replace(found.restored, gate=gate))
            group = _LAYER_GROUP if gate else layers
            groups = [range(first, min(first + group, layers)) for first in range(0, layers, group)]
            with closing(
                self._pieces(session, found.lease_id, parts, self._cost_model.load_timeout(copied))
            ) as arriving:
                for pieces, far in arriving:
                    for there in load_layers(pool, pieces, far, groups):
                        if not session.leases_valid:
                            raise ConnectionError("the session ended while chunks were copied")
                        if gate:
                            gate.open(there.stop)
                        if not load.wanted:
                            return
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._cost_model.record_timeout(copied, time.perf_counter() - began)
            raise
        finally:
            if gate:
                gate.fail()
            session.release([found.lease_id])
        ended = time.perf_counter()
        self._cost_model.record_load(copied, found.lookup_seconds + ended - began)
        self._stats.loaded_bytes += int(sum(p.size_bytes * share for p, share in zip(parts, shares, strict=True)))
        if not gate:
            load.report(replace(found.restored, restore_ms=(ended - found.restored.looked_up_at) * 1e3))

    def _pieces(
        self, session: Session, lease_id: bytes, parts: tuple[ChunkCopy, ...], most: float
    ) -> Generator[tuple[list[Piece], list[Piece]], None, None]:
        """Parts with their payloads, those that all layers get and the far ones: all at once where they are in memory,
        so that layers can be copied in order; else one by one, as they come, for ``most`` seconds."""
        payloads = session.read(lease_id, [part.match for part in parts], self._timeout, most)
        with closing(payloads):
            pieces = (
                (
                    part.global_layers_only,
                    Piece(header_of(part.match, self._geometry), payload, part.slots, part.rotation),
                )
                for part, payload in zip(parts, payloads, strict=True)
            )
            for some in [list(pieces)] if session.transport.zero_copy else ([one] for one in pieces):
                yield [piece for far, piece in some if not far], [piece for far, piece in some if far]

    @staticmethod
    def _plan_window(sequence: Sequence, pool: KVPool, answer: pb.MatchResponse, stored: StoredPrefix) -> WindowPlan:
        """What of the longest stored prefix is used, and how much of it is loaded."""
        tokens = passed = answer.passed_tokens
        for match in answer.matches:
            if match.start_position != tokens:
                raise ValueError(f"a chunk at {match.start_position} does not continue {tokens} tokens")
            tokens += match.matched_tokens
        assert sequence.kv.table is not None
        # The last token is always computed: its logits are wanted.
        found, goes_on = min(tokens, len(sequence.tokens) - 1), stored.tokens if sequence.request.cache.write else None
        return plan_window(pool, sequence.kv.table, sequence.kv.num_computed, found, goes_on, passed)

    @staticmethod
    def _prefix_copies(sequence: Sequence, pool: KVPool, matches: Any, use: WindowPlan) -> list[ChunkCopy]:
        """The chunks that all layers get, and those that only layers without a window do."""
        out: list[ChunkCopy] = []
        for match in matches:
            start = match.start_position
            end = min(start + match.matched_tokens, use.tokens)
            whole = end > use.start
            if end > max(start, sequence.kv.num_computed) and (whole or pool.wide_layers):
                slots = torch.from_numpy(use.table.slots(start, end))
                # What the pool has already stays as it is; others may be reading it.
                slots[: max(0, sequence.kv.num_computed - start)] = pool.padding_slot
                slots[slots == UNMAPPED] = pool.padding_slot
                out.append(ChunkCopy(match, slots, global_layers_only=not whole))
        return out

    def chunks_at(
        self, session: Session, root: bytes, sequence: Sequence, tokens: list[int], position: int
    ) -> list[bytes]:
        """Prefix hashes of the stored chunks that a prompt has at a position, where it begins so or anywhere. Raises
        grpc.RpcError."""
        contents = self._content_probes(session, root, sequence, tokens)
        salt = sequence.request.cache.tenant_salt
        request = pb.MatchRequest(session_id=session.id, tenant_salt=salt, token_ids=tokens, contents=contents)
        answer = session.match(request, self._match_timeout(session, len(tokens)))
        session.release([answer.lease_id])
        found = [(match.start_position, match) for match in answer.matches]
        found += [(content.start, content.match) for content in answer.contents]
        return [match.prefix_hash for start, match in found if start <= position < start + match.matched_tokens]

    def _content_probes(
        self, session: Session, root: bytes, sequence: Sequence, tokens: list[int]
    ) -> list[pb.ContentProbe]:
        """The chunks of a prompt that might have been read elsewhere, where such may be reused."""
        if not self.allows_relocation(session, sequence):
            return []
        # The last token is always computed.
        tokens = tokens[:-1]
        return [
            pb.ContentProbe(start=a, tokens=b - a)
            for a, b in pairwise([0, *self._policy.chunker.ends(tokens, document_marks(sequence))])
            if b > sequence.kv.num_computed
            and _MIN_RELOCATED_TOKENS <= b - a <= session.max_chunk_tokens
            and session.may_contain_content(root, tokens[a:b])
        ]

    def _relocated_copies(
        self, sequence: Sequence, pool: KVPool, contents: Any, exact: int
    ) -> tuple[list[ChunkCopy], list[RelocatedSpan]]:
        """Chunks that were found by content, keys turned to where the prompt has them."""
        assert sequence.kv.table is not None
        out: list[ChunkCopy] = []
        stretches: list[RelocatedSpan] = []
        for found in contents:
            match = found.match
            end = found.start + match.tokens
            # The first tokens of all attract attention whatever they say; elsewhere they must not.
            start = max(found.start + (SINK_TOKENS if match.start_position == 0 else 0), exact)
            if end - start < _MIN_RELOCATED_TOKENS:
                continue
            slots = torch.from_numpy(sequence.kv.table.slots(found.start, end))
            slots[: start - found.start] = pool.padding_slot
            delta = found.start - match.start_position
            assert self._policy.key_rotation is not None
            rotation = self._policy.key_rotation.by(delta) if delta else None
            out.append(ChunkCopy(match, slots, rotation))
            stretches.append(RelocatedSpan(start, end))
        return out, stretches

    def _relocation_pays(self, chosen: RecomputeSetting) -> bool:
        """Whether loading and repairing a token is cheaper than computing it; not asked when the operator insists."""
        share = recompute_cost(chosen.selector, chosen.ratio, self._geometry.layers, self._projection_share)
        return self._policy.mode == "always" or self._cost_model.worth_reusing(share)

    def _chunk_ends(self, session: Session, sequence: Sequence) -> list[int]:
        """Where the prompt would be cut into chunks, for a daemon that can ask others for them."""
        if not session.remote:
            return []
        ends = self._policy.chunker.ends(sequence.tokens, document_marks(sequence))
        most = session.max_chunk_tokens
        cuts = [at for start, end in pairwise([0, *ends]) for at in (*range(start + most, end, most), end)]
        return cuts[:MAX_CUTS]

    def _match_timeout(self, session: Session, tokens: int) -> float:
        """Seconds to wait for a Match, which may have to read so many tokens from disk, or from afar in the time that
        they could be computed in."""
        afar = tokens * self._cost_model.prefill_seconds_per_token if session.remote else 0.0
        return self._timeout + tokens * self._token_bytes / _DISK_BYTES_PER_SECOND + min(afar, _MAX_REMOTE_SECONDS)


def document_marks(sequence: Sequence) -> DocumentMarks:
    """The request's marks, and one where its prompt ends: the answer is no part of the last document."""
    marks = sequence.request.cache.marks
    return replace(marks, segment_ends=(*marks.segment_ends, sequence.request.num_prompt_tokens))


def _stored_prefix(passed: int, matches: Any, cuts: list[int] | None) -> StoredPrefix:
    """Where storing goes on: after the last chunk that matched wholly. Where nodes share chunks, which they know by
    their ``cuts``, after the last one up to which all are cut so: a tail in between would be unknown to others, with
    what follows it, so the chunk that takes its place is stored anew. ``matches`` come after ``passed`` tokens."""
    tokens, last, covered, shared = 0, b"", passed, True
    for n, match in enumerate(matches):
        covered += match.matched_tokens
        shared = shared and (cuts is None or cuts[n : n + 1] == [covered])
        if shared and match.matched_tokens == match.tokens:
            tokens, last = covered, match.prefix_hash
    return StoredPrefix(tokens, last, covered)
