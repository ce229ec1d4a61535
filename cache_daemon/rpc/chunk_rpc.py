"""Chunk RPCs of workers: Match, Release, Reserve, Commit, Abort."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import Context, UnknownSession
from kvsidecar.miss_kinds import miss_kind_name

from cache_daemon.diagnostics.miss_explainer import PromptOwner
from cache_daemon.rpc import request_validation
from cache_daemon.rpc.call_wrapper import unary, undo_if_cancelled
from cache_daemon.rpc.servicer_base import ServicerBase
from cache_daemon.store.lookup import FetchHints, MatchResult
from cache_daemon.store.prefix_index import MatchedChunk
from cache_daemon.store.prompt_hints import PromptHints
from cache_daemon.store.reservations import ReserveResult
from cache_daemon.store.sessions import rename_handle
from cache_daemon.store.yield_timer import YieldTimer

# Long responses are built in slices that yield to the event loop.
_SLICE_CHUNKS, _SLICE_HEADERS = 512, 16
# Prompts longer than this yield to the event loop between steps.
_LONG_TOKENS = 1 << 16
_DEFAULT_REMOTE_SECONDS, _REMOTE_DEADLINE_SHARE = 60.0, 0.8


class ChunkServicer(ServicerBase):
    """Lookup and two-phase insert by sessions."""

    @unary
    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:
        request_validation.check_max("the number of token_ids", len(request.token_ids), request_validation.MAX_TOKENS)
        # NumPy converts a repeated field in one call, which is fast for long prompts.
        ids = np.array(request.token_ids, "<u4").tobytes()
        if len(request.token_ids) > _LONG_TOKENS:
            await asyncio.sleep(0)
        if not request.session_id:
            found = self.store.probe(self.root(context, request.namespace, request.tenant_salt), ids)
            answer = pb.MatchResponse(matched_tokens=sum(n for _, n in found), epoch=self.store.epoch)
            for at in range(0, len(found), _SLICE_CHUNKS):
                await asyncio.sleep(0)
                answer.matches.extend(c.to_match(n, with_offsets=False) for c, n in found[at : at + _SLICE_CHUNKS])
            if request.explain:
                owner = PromptOwner.of(request.namespace, request.tenant_salt)
                self._explain(request, context, owner, ids, found, answer)
            return answer
        session, salt = self.session(context, request.session_id), self.salt(context, request.tenant_salt)
        probes = request_validation.check_content_probes(request.contents, len(request.token_ids))
        name = request_validation.check_lease_id(request.lease_id)
        request_validation.check_capacity("leases of this session", len(session.leases), request_validation.MAX_LEASES)
        held = sum(len(hold.chunks) for hold in session.leases.values()) if len(session.leases) > 16 else 0
        request_validation.check_capacity(
            "chunks under lease in this session", held, request_validation.MAX_LEASED_CHUNKS
        )
        if self.shared.on_lookup is not None:
            self.shared.on_lookup(keys.tenant_root(session.namespace, salt), ids)
        fetching = FetchHints(
            request_validation.check_cuts(request.cuts, len(request.token_ids)),
            request_validation.check_seconds_per_token(request.seconds_per_token),
            _remote_timeout(context),
        )
        hints = self._prompt_hints(request)
        result = await self.store.match(session, salt, ids, probes, request.window, hints, fetching)
        if result.lease_id:
            result = replace(result, lease_id=rename_handle(session.leases, result.lease_id, name))
            undo_if_cancelled(context, lambda: self.store.release(session, [result.lease_id]))
        answer = await self._matched(result, with_offsets=session.shares_memory)
        answer.remote_tokens, answer.remote_ms = result.fetched_tokens, result.fetch_ms
        if request.explain:
            owner = PromptOwner.of(session.namespace, salt)
            self._explain(request, context, owner, ids, result.matches, answer, load_slower=result.load_slower)
        return answer

    def _explain(
        self,
        request: pb.MatchRequest,
        context: Context,
        owner: PromptOwner,
        ids: bytes,
        matches: Sequence[MatchedChunk],
        answer: pb.MatchResponse,
        *,
        load_slower: bool = False,
    ) -> None:
        """Add the reason of the miss; only operators learn about other tenants."""
        across = request.across_tenants and self.principal_of(context).operator
        reason = self.store.misses.explain(
            owner,
            ids,
            matches,
            answer.matched_tokens,
            request.known_tokens,
            across_tenants=across,
            load_slower=load_slower,
        )
        if reason is not None:
            answer.miss.CopyFrom(reason)
            if not self.private:
                return
            missing = len(ids) // keys.TOKEN_BYTES - max(answer.matched_tokens, request.known_tokens)
            account = self.store.accounts.account_of(owner.tenant_id).id
            self.shared.reuse.add_miss(owner.namespace, account, miss_kind_name(reason.kind), missing)

    @unary
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        session = self.session(context, request.session_id)
        for report in request_validation.check_load_reports(request):
            if lease := session.leases.get(report.lease_id):
                self.shared.reuse.add_load(session, lease.chunks, report)
        return pb.ReleaseResponse(released=self.store.release(session, request.lease_ids))

    @unary
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        session, salt = self.session(context, request.session_id), self.salt(context, request.tenant_salt)
        request_validation.check_headers(request.headers)
        names = request_validation.check_reservation_ids(request.reservation_ids, len(request.headers))
        hints = self._prompt_hints(request)
        request_validation.check_capacity(
            "reservations of this session", len(session.reservations), request_validation.MAX_RESERVATIONS
        )
        reserved: list[ReserveResult] = []

        def abort_reserved() -> None:
            self.store.abort(session, [r.reservation_id for r in reserved if r.reservation_id])

        yield_timer = YieldTimer()
        try:
            for at in range(0, len(request.headers), _SLICE_HEADERS):
                headers = request.headers[at : at + _SLICE_HEADERS]
                for made, name in zip(self.store.reserve(session, salt, headers, hints), names[at:], strict=False):
                    reservation_id = rename_handle(session.reservations, made.reservation_id, name)
                    reserved.append(replace(made, reservation_id=reservation_id))
                await yield_timer.maybe_yield()
                if session.closed:
                    raise UnknownSession("the session ended while its request was served; call Attach again")
        except BaseException:
            abort_reserved()
            raise
        undo_if_cancelled(context, abort_reserved)
        return pb.ReserveResponse(reservations=[_reservation(r) for r in reserved])

    @unary
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        session = self.session(context, request.session_id)
        request_validation.check_max("the number of items", len(request.items), request_validation.MAX_ITEMS)
        items = [(item.reservation_id, item.checksum) for item in request.items]
        reserved = [session.reservations.get(reservation_id) for reservation_id, _ in items]
        outcomes = await self.store.commit(session, request.epoch, items)
        for one, outcome in zip(reserved, outcomes, strict=True):
            if one is not None and outcome == pb.COMMIT_OUTCOME_COMMITTED:
                header = one.header
                self.shared.reuse.add_stored(session, one.tenant.id, header.token_count, header.payload_bytes)
        return pb.CommitResponse(committed=outcomes.count(pb.COMMIT_OUTCOME_COMMITTED), outcomes=outcomes)

    @unary
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        session = self.session(context, request.session_id)
        return pb.AbortResponse(aborted=self.store.abort(session, request.reservation_ids))

    def _prompt_hints(self, request: pb.MatchRequest | pb.ReserveRequest) -> PromptHints:
        """Return the hints of a request. Raises InvalidRequest."""
        now = self.store.now
        return PromptHints(
            self.store.ttl.deadline_of(request_validation.check_ttl(request.ttl_seconds)),
            tuple((end, now + seconds) for end, seconds in request_validation.check_retained(request.retained)),
            request_validation.check_group(request.group),
            request.low_priority,
        )

    async def _matched(self, result: MatchResult, *, with_offsets: bool) -> pb.MatchResponse:
        """Build the response of a match.

        Callers without shared memory get no offsets, because offsets reveal the sizes of other tenants' chunks.
        """
        out = pb.MatchResponse(
            matched_tokens=result.matched_tokens,
            passed_tokens=result.passed_tokens,
            promoted_tokens=result.promoted_tokens,
            promote_ms=result.promote_ms,
            lease_id=result.lease_id,
            epoch=self.store.epoch,
        )
        whole = list(result.matches)
        last = whole.pop() if whole and whole[-1].tokens < whole[-1].chunk.tokens else None
        for at in range(0, len(whole), _SLICE_CHUNKS):
            if at:
                await asyncio.sleep(0)
            # Building a Python message for each chunk would take longer than finding it.
            if with_offsets:
                out.MergeFromString(b"".join([m.chunk.encoded_match() for m in whole[at : at + _SLICE_CHUNKS]]))
            else:
                out.matches.extend(m.chunk.to_match(m.tokens, with_offsets) for m in whole[at : at + _SLICE_CHUNKS])
        if last is not None:
            out.matches.append(last.chunk.to_match(last.tokens, with_offsets))
        for at in range(0, len(result.contents), _SLICE_CHUNKS):
            if len(result.contents) > _SLICE_CHUNKS:
                await asyncio.sleep(0)
            out.contents.extend(
                pb.ContentMatch(start=start, match=m.chunk.to_match(m.tokens, with_offsets))
                for start, m in result.contents[at : at + _SLICE_CHUNKS]
            )
        return out


def _remote_timeout(context: Context) -> float:
    """Return the seconds that a match may wait for the remote tier.

    This is a share of the time until the call's deadline; the remaining time is for the answer.
    """
    left = context.time_remaining()
    return _DEFAULT_REMOTE_SECONDS if left is None else max(0.0, left * _REMOTE_DEADLINE_SHARE)


def _reservation(reserved: ReserveResult) -> pb.Reservation:
    out = pb.Reservation(
        outcome=reserved.outcome, prefix_hash=reserved.prefix_hash, reservation_id=reserved.reservation_id
    )
    if reserved.staged is not None:
        out.staging.offset, out.staging.size_bytes = reserved.staged.offset, reserved.staged.size_bytes
    return out
