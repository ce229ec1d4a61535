"""Chunk loader: copies a prompt's cached tokens from the daemon into the pool."""

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
from kvkernels import ChunkPlacement, LoadedLayers
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import MAX_CUTS, MAX_PROBES, SINK_TOKENS
from kvsidecar.kv_transfer.prefix_lookup import header_of
from kvsidecar.kv_transfer.session import CompletedLoad, Session
from torch import Tensor

from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.context_reuse.reuse_plan import RelocatedSpan, ReusePlan
from inference_svc.context_reuse.reuse_policy import RecomputeSetting
from inference_svc.context_reuse.rope_shift import Rotation
from inference_svc.context_reuse.selectors.selector import question_rows, recompute_cost
from inference_svc.kv_client.client_context import ClientContext
from inference_svc.kv_client.pool_writer import PoolWriter
from inference_svc.kv_client.sequence_load import SequenceLoad
from inference_svc.kv_client.window_plan import WindowPlan, plan_window
from inference_svc.kv_pool.block_table import UNMAPPED
from inference_svc.kv_pool.kv_pool import WINDOW_STEP, KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.model_runner.layerwise_load import LayerReadyEvent, group_layers
from inference_svc.sequence.kv_connector import MISS_REPAIR_SLOWER, LoadResult
from inference_svc.sequence.sequence import Sequence

# Shorter relocated chunks are not reused: the errors at their edges outweigh the saved prefill.
_MIN_RELOCATED_TOKENS = 8
# A load of at least this many tokens is layerwise: the engine may compute once the first group of layers is loaded.
_MIN_LAYERWISE_TOKENS = 512
# Assumed speed of the daemon's disk. The timeout of Match allows for reading the matched chunks at this speed.
_DISK_BYTES_PER_SECOND = 200e6
# Maximum time that a Match waits for the remote tier.
_MAX_REMOTE_SECONDS = 10.0


@dataclass(frozen=True)
class ChunkCopy:
    """A leased chunk, and the pool slots for its first tokens.

    ``rotation`` is the RoPE shift of its keys. With ``global_layers_only``, only layers without a window are copied.
    """

    match: pb.ChunkMatch
    slots: Tensor
    rotation: Rotation | None = None
    global_layers_only: bool = False

    @property
    def size_bytes(self) -> int:
        """Payload bytes of the copied tokens."""
        return self.match.payload_bytes * len(self.slots) // self.match.tokens


@dataclass(frozen=True)
class LoadPlan:
    """Leased chunks to copy for a load.

    The engine gets ``restored`` after the copy. ``lookup_seconds`` is the time of the lookup, without the time of the
    remote tier.
    """

    lease_id: bytes
    copies: tuple[ChunkCopy, ...]
    restored: LoadResult
    lookup_seconds: float


class ChunkLoader:
    """Looks up prompts and copies their chunks. Methods block; any thread may call them."""

    def __init__(self, context: ClientContext) -> None:
        self._geometry, self._policy = context.geometry, context.policy
        self._cost_model, self._stats = context.cost_model, context.stats
        self._projection_share, self._timeout = context.projection_share, context.timeout_seconds
        self._counting = threading.Lock()
        g = context.geometry
        self._token_bytes = 4 * g.layers * g.kv_heads * g.head_dim * g.bits / 8  # roughly: keys and values

    def skips_lookup(self, session: Session, root: bytes, sequence: Sequence) -> bool:
        """True if the Bloom filter excludes a prefix match; counts the skipped lookup.

        Always False with a remote tier, because the filter does not contain chunks that other nodes stored there.
        """
        if session.remote or session.may_contain(root, sequence.tokens):
            return False
        with self._counting:
            session.count_skipped_lookup(len(sequence.tokens))
        return True

    def allows_relocation(self, session: Session, sequence: Sequence) -> bool:
        """True if relocated chunks may be used. Always False if the blocks cover only a window of the prompt."""
        table = sequence.kv.table  # None if the engine has freed the blocks of an abandoned load
        if table is not None and table.tokens < len(sequence.tokens):
            return False
        return sequence.request.cache.reuse_anywhere and self._policy.recompute_setting(session.verdict) is not None

    def look_up(self, session: Session, root: bytes, load: SequenceLoad) -> LoadPlan | None:
        """Look up a prompt and plan its load; None if there is nothing to copy.

        If the lookup found nothing to copy, it may already have reported the load. Does not change the sequence.
        Several threads may call it at once.
        """
        began, sequence = time.perf_counter(), load.sequence
        probes = self._content_probes(session, root, sequence, sequence.tokens)
        longest = sorted(probes, key=lambda probe: -probe.tokens)[:MAX_PROBES]
        contents = sorted(longest, key=lambda probe: probe.start)
        if not contents and self.skips_lookup(session, root, sequence):
            return None
        cuts, cache = self._chunk_ends(session, sequence), sequence.request.cache
        request = pb.MatchRequest(
            session_id=session.id,
            tenant_salt=cache.tenant_salt,
            token_ids=sequence.tokens,
            contents=contents,
            cuts=cuts,
            # With 0, the daemon fetches remote chunks even if computing them would be faster.
            seconds_per_token=0.0 if cache.hints.fetch else self._cost_model.prefill_seconds_per_token,
            window=0 if session.remote or not load.pool.window else load.pool.window + WINDOW_STEP,
            explain=not sequence.miss.done(),
            known_tokens=sequence.kv.num_computed,
            across_tenants=sequence.request.explain_across_tenants,
        )
        cache.hints.add_to(request)
        with sequence.trace.part("lookup", sequence.timestamps.admitted_at):
            answer = session.match(request, self._match_timeout(session, len(sequence.tokens)))
        looked_up, load.answer = time.perf_counter(), answer
        found: LoadPlan | None = None
        try:
            if answer.epoch != session.epoch:
                raise ValueError(f"an answer of epoch {answer.epoch:x} in a session of epoch {session.epoch:x}")
            if load.claim():
                # The last cut is the end of the prompt, which is not a chunk boundary.
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
        """Choose the chunks of a Match answer to copy, and build the result that the engine gets after the copy."""
        sequence, pool = load.sequence, load.pool
        stored = _stored_prefix(answer.passed_tokens, answer.matches, cuts)
        use = self._plan_window(sequence, pool, answer, stored)
        parts = self._prefix_copies(sequence, pool, answer.matches, use)
        exact = max(use.tokens, sequence.kv.num_computed)
        repair = self._policy.recompute_setting(session.verdict)
        placed, plan = self._relocated_copies(sequence, pool, answer.contents if repair else (), exact)
        if repair is not None and plan is not None and not self._relocation_pays(repair, plan):
            placed, plan = [], None
            sequence.set_miss(MISS_REPAIR_SLOWER)
        parts += placed
        restored = LoadResult(
            tokens=use.tokens,
            table=use.table,
            plan=plan,
            repair=repair if plan is not None else None,
            stored=stored,
            lookup_ms=(looked_up - began) * 1e3,
            transfer_ms=answer.promote_ms,
            looked_up_at=looked_up,
        )
        # The lookup time excludes the remote tier's time, which the daemon itself compared with the cost of a prefill.
        return LoadPlan(answer.lease_id, tuple(parts), restored, looked_up - began - answer.remote_ms / 1e3)

    def copy(self, session: Session, found: LoadPlan, load: SequenceLoad) -> None:
        """Copy planned chunks into the pool, in order of layers, and release their lease.

        A large load is reported before the copy, with a gate. The gate opens layer by layer for the engine's stream, as
        soon as the copy of a group of layers is enqueued; this thread waits for the device at the end. If the copy of a
        load without a gate is incomplete, the caller must report the load.
        """
        began, parts, pool = time.perf_counter(), found.copies, load.pool
        layers, gate = self._geometry.layers, None
        shares = [len(pool.wide_layers) / layers if part.global_layers_only else 1.0 for part in parts]
        copied = int(sum(len(part.slots) * share for part, share in zip(parts, shares, strict=True)))
        done: CompletedLoad | None = None
        try:
            if not load.wanted:
                return
            if copied >= _MIN_LAYERWISE_TOKENS and session.transport.zero_copy:
                gate = LayerReadyEvent(layers)
                load.report(replace(found.restored, gate=gate))
            groups = [range(layers)]
            if gate:
                groups = group_layers(layers, sum(part.match.payload_bytes for part in parts) // layers)
            max_seconds = self._cost_model.load_timeout(copied)

            def accept(loaded: LoadedLayers) -> bool:
                if not session.leases_valid:
                    raise ConnectionError("the session ended while chunks were copied")
                if gate:
                    gate.open(loaded.layers.stop, loaded.ready)
                return load.wanted

            with closing(self._pieces(session, found.lease_id, parts, pool, max_seconds)) as arriving:
                if not PoolWriter(pool, groups).write(arriving, accept):
                    return
            if gate:
                gate.complete_load()
            size_bytes = int(sum(p.size_bytes * share for p, share in zip(parts, shares, strict=True)))
            done = CompletedLoad(copied, size_bytes, found.lookup_seconds + time.perf_counter() - began)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._cost_model.record_timeout(copied, time.perf_counter() - began)
            raise
        finally:
            if gate:
                gate.fail()
            session.release([found.lease_id], done)
        self._stats.record_load(done, copied * self._cost_model.prefill_seconds_per_token)
        self._cost_model.record_load(copied, done.seconds)
        if not gate:
            ended = began + done.seconds - found.lookup_seconds
            load.report(replace(found.restored, restore_ms=(ended - found.restored.looked_up_at) * 1e3))

    def _pieces(
        self, session: Session, lease_id: bytes, parts: tuple[ChunkCopy, ...], pool: KVPool, max_seconds: float
    ) -> Generator[list[ChunkPlacement], None, None]:
        """Yield chunk placements. Chunks in shared memory come together, so that layers can be copied in order.

        Streamed payloads come one by one as they arrive, for at most ``max_seconds``.
        """
        payloads = session.read(lease_id, [part.match for part in parts], self._timeout, max_seconds)
        with closing(payloads):
            pieces = (
                ChunkPlacement(header_of(part.match, self._geometry), payload, part.slots, part.rotation, layers)
                for part, payload in zip(parts, payloads, strict=True)
                for layers in [frozenset(pool.wide_layers) if part.global_layers_only else None]
            )
            yield from [list(pieces)] if session.transport.zero_copy else ([one] for one in pieces)

    @staticmethod
    def _plan_window(sequence: Sequence, pool: KVPool, answer: pb.MatchResponse, stored: StoredPrefix) -> WindowPlan:
        """Choose the tokens of the longest stored prefix to use and to load."""
        tokens = passed = answer.passed_tokens
        for match in answer.matches:
            if match.start_position != tokens:
                raise ValueError(f"a chunk at {match.start_position} does not continue {tokens} tokens")
            tokens += match.matched_tokens
        assert sequence.kv.table is not None
        # The last token is always computed, because the sampler needs its logits.
        found = min(tokens, len(sequence.tokens) - 1)
        save_from = stored.tokens if sequence.request.cache.write else None
        return plan_window(pool, sequence.kv.table, sequence.kv.num_computed, found, save_from, passed)

    @staticmethod
    def _prefix_copies(sequence: Sequence, pool: KVPool, matches: Any, use: WindowPlan) -> list[ChunkCopy]:
        """Plan the copies of prefix chunks. Some are only for layers without a window."""
        out: list[ChunkCopy] = []
        for match in matches:
            start = match.start_position
            end = min(start + match.matched_tokens, use.tokens)
            whole = end > use.start
            if end > max(start, sequence.kv.num_computed) and (whole or pool.wide_layers):
                slots = torch.from_numpy(use.table.slots(start, end))
                # Do not overwrite tokens that are in the pool already: other sequences may read them.
                slots[: max(0, sequence.kv.num_computed - start)] = pool.discard_slot
                slots[slots == UNMAPPED] = pool.discard_slot
                out.append(ChunkCopy(match, slots, global_layers_only=not whole))
        return out

    def prefetch(self, session: Session, sequence: Sequence) -> int:
        """Promote a prompt's stored chunks to the daemon's memory, from the remote tier, too.

        Returns the number of their tokens. Raises grpc.RpcError.
        """
        cache = sequence.request.cache
        cuts = self._chunk_ends(session, sequence)
        request = pb.MatchRequest(
            session_id=session.id, tenant_salt=cache.tenant_salt, token_ids=sequence.tokens, cuts=cuts
        )
        cache.hints.add_to(request)
        answer = session.match(request, self._match_timeout(session, len(sequence.tokens)))
        session.release([answer.lease_id])
        return answer.matched_tokens

    def chunks_at(
        self, session: Session, root: bytes, sequence: Sequence, tokens: list[int], position: int
    ) -> list[bytes]:
        """Find the prefix hashes of stored chunks that contain a prompt's token at ``position``.

        Includes prefix matches and content matches. Raises grpc.RpcError.
        """
        probes = self._content_probes(session, root, sequence, tokens)
        contents = [probe for probe in probes if probe.start <= position < probe.start + probe.tokens]
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
        """List the chunks of a prompt that may be stored behind another prefix; empty if relocation is off."""
        if not self.allows_relocation(session, sequence):
            return []
        tokens = tokens[:-1]  # the last token is always computed
        return [
            pb.ContentProbe(start=a, tokens=b - a)
            for a, b in pairwise([0, *self._policy.chunker.ends(tokens, document_marks(sequence))])
            if b > sequence.kv.num_computed
            and _MIN_RELOCATED_TOKENS <= b - a <= session.max_chunk_tokens
            and session.may_contain_content(root, tokens[a:b])
        ]

    def _relocated_copies(
        self, sequence: Sequence, pool: KVPool, contents: Any, exact: int
    ) -> tuple[list[ChunkCopy], ReusePlan | None]:
        """Plan the copies of content matches. RoPE shift moves them to their positions in the prompt."""
        assert sequence.kv.table is not None
        out: list[ChunkCopy] = []
        stretches: list[RelocatedSpan] = []
        for found in contents:
            match = found.match
            end = found.start + match.tokens
            # The first tokens of any prompt become attention sinks. At another position their keys would be wrong.
            start = max(found.start + (SINK_TOKENS if match.start_position == 0 else 0), exact)
            if end - start < _MIN_RELOCATED_TOKENS:
                continue
            slots = torch.from_numpy(sequence.kv.table.slots(found.start, end))
            slots[: start - found.start] = pool.discard_slot
            delta = found.start - match.start_position
            assert self._policy.key_rotation is not None
            rotation = self._policy.key_rotation.by(delta) if delta else None
            out.append(ChunkCopy(match, slots, rotation))
            stretches.append(RelocatedSpan(start, end))
        return out, ReusePlan(len(sequence.tokens), exact, tuple(stretches)) if stretches else None

    def _relocation_pays(self, chosen: RecomputeSetting, plan: ReusePlan) -> bool:
        """True if load and recompute together are cheaper than prefill. Always true with ``unverified``."""
        question = question_rows(chosen.selector, len(plan.uncached_positions)) / len(plan.approximate_positions)
        share = recompute_cost(chosen.selector, chosen.ratio, self._geometry.layers, self._projection_share, question)
        return self._policy.unverified or self._cost_model.worth_reusing(share)

    def _chunk_ends(self, session: Session, sequence: Sequence) -> list[int]:
        """Compute the prompt's chunk boundaries for a daemon with a remote tier; empty without a remote tier."""
        if not session.remote:
            return []
        ends = self._policy.chunker.ends(sequence.tokens, document_marks(sequence))
        most = session.max_chunk_tokens
        cuts = [at for start, end in pairwise([0, *ends]) for at in (*range(start + most, end, most), end)]
        return cuts[:MAX_CUTS]

    def _match_timeout(self, session: Session, tokens: int) -> float:
        """Compute the timeout of a Match, in seconds.

        It includes the time to read ``tokens`` tokens from disk. With a remote tier it also includes their prefill
        time.
        """
        afar = tokens * self._cost_model.prefill_seconds_per_token if session.remote else 0.0
        return self._timeout + tokens * self._token_bytes / _DISK_BYTES_PER_SECOND + min(afar, _MAX_REMOTE_SECONDS)


def document_marks(sequence: Sequence) -> DocumentMarks:
    """Add the end of the prompt to a request's marks."""
    return replace(sequence.request.cache.marks, prompt_end=sequence.request.num_prompt_tokens)


def _stored_prefix(passed: int, matches: Any, cuts: list[int] | None) -> StoredPrefix:
    """Find the prefix after which a save continues: it ends with the last chunk that matched completely.

    ``matches`` begin after ``passed`` tokens. Nodes that share chunks must use the same boundaries, ``cuts``. With
    ``cuts``, the save continues after the last chunk up to which all boundaries agree. Other nodes would find neither a
    chunk with another boundary nor the chunks after it, so the save stores the tokens of all these chunks again.
    """
    tokens, last, covered, shared = 0, b"", passed, True
    for n, match in enumerate(matches):
        covered += match.matched_tokens
        shared = shared and (cuts is None or cuts[n : n + 1] == [covered])
        if shared and match.matched_tokens == match.tokens:
            tokens, last = covered, match.prefix_hash
    return StoredPrefix(tokens, last, covered)
