"""Admin RPCs: Pin, Unpin, Delete, ReleaseGroup, Carry, List and Stats."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import accumulate

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import Context, InvalidRequest, StoreUnavailable
from kvsidecar.keys import HASH_BYTES

from cache_daemon.rpc import caller_budgets, request_validation
from cache_daemon.rpc.call_wrapper import streaming, unary
from cache_daemon.rpc.servicer_base import ServicerBase

# Token limit of a ``List`` page with tokens, which bounds the stall of the event loop. The first chunk may exceed it.
_MAX_PAGE_TOKENS = 1 << 16
# Maximal time to wait until a pin is on disk.
_WRITTEN_SECONDS = 5.0


class AdminServicer(ServicerBase):
    """RPCs of operators and tenants.

    A caller sees the tenants whose salts it may use; an operator sees all tenants.
    """

    @unary
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        caller = self._caller(context, request.caller)
        chunks = self.store.pin(*self._prefix(request.prefix, context), caller)
        await self._await_pin("pinned")
        return pb.PinResponse(chunks=chunks)

    @unary
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        caller = self._caller(context, request.caller)
        chunks = self.store.unpin(*self._prefix(request.prefix, context), caller)
        await self._await_pin("unpinned")
        return pb.UnpinResponse(chunks=chunks)

    @unary
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:
        prefix = request.prefix
        if prefix.namespace or prefix.root:
            root = self._root(prefix, context)
        else:
            if prefix.prefix_hash or prefix.tenant_salt:
                raise InvalidRequest(
                    "prefix_hash or tenant_salt is set without namespace or root; set one of them, or nothing to "
                    "delete everything"
                )
            self.principal_of(context).require_operator("delete everything")
            root = b""
        key = request_validation.check_hash("prefix_hash", prefix.prefix_hash, optional=True)
        return pb.DeleteResponse(deleted=await self.store.delete(root, key, self.external_caller(context)))

    @unary
    async def ReleaseGroup(self, request: pb.ReleaseGroupRequest, context: Context) -> pb.ReleaseGroupResponse:
        root = self.root(context, request.namespace, request.tenant_salt)
        if not request_validation.check_group(request.group):
            raise InvalidRequest("group is empty; name the group to release")
        return pb.ReleaseGroupResponse(released=await self.store.groups.release(root, request.group))

    @streaming
    async def Carry(self, request: pb.CarryRequest, context: Context) -> AsyncIterator[pb.CarryResponse]:
        # Guests use the remote tier through Match and Commit; a bulk transfer would load the shared backend.
        self.principal_of(context).require_operator("carry a tenant to the remote tier, or from there")
        root = self.root(context, request.namespace, request.tenant_salt)
        with self.stream(context, "Carry", caller_budgets.TRANSFERS):
            if request.direction == pb.CARRY_DIRECTION_TO_REMOTE:
                transfer = self.store.transfer
                steps = transfer.push([chunk async for chunk in self.store.listing.iter_chunks(root)])
            elif request.direction == pb.CARRY_DIRECTION_FROM_REMOTE:
                request_validation.check_descriptor(request.descriptor)
                if keys.namespace_id(request.descriptor) != request.namespace:
                    raise InvalidRequest("the descriptor is not the namespace's; send that of one of its workers")
                tenant = keys.tenant_id(request.tenant_salt)
                steps = self.store.transfer.pull(root, tenant, Geometry.of(request.descriptor))
            else:
                raise InvalidRequest("direction is not set; it must be TO_REMOTE or FROM_REMOTE")
            async with aclosing(steps) as told:  # type: ignore[type-var]
                async for now in told:
                    yield pb.CarryResponse(
                        done=now.done,
                        total=now.total,
                        chunks=now.chunks,
                        payload_bytes=now.payload_bytes,
                        known=now.known,
                        lost=now.lost,
                    )

    @unary
    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        request_validation.check_max("page_size", request.page_size, request_validation.MAX_PAGE)
        size = request.page_size or 100
        if request.namespace:
            root = self.root(context, request.namespace, request.tenant_salt)
        else:
            self.principal_of(context).require_operator("list all tenants")
            root = b""
        if len(request.page_token) not in (0, 2 * HASH_BYTES):
            raise InvalidRequest(f"page_token has {len(request.page_token)} bytes; use that of the previous answer")
        chunks = self.store.listing.page(root, request.page_token, size + 1)
        if request.with_tokens:
            ends = accumulate(c.tokens for c in chunks)
            size = min(size, max(1, sum(end <= _MAX_PAGE_TOKENS for end in ends)))
        last = chunks[size - 1] if len(chunks) > size else None
        now = self.store.now
        return pb.ListResponse(
            chunks=[c.info(now, with_tokens=request.with_tokens) for c in chunks[:size]],
            next_page_token=last.root + last.key if last else b"",
        )

    @unary
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        if request.namespace:
            return await self.store.stats_of(self.root(context, request.namespace, request.tenant_salt))
        self.principal_of(context).require_operator("see the statistics of all tenants")
        out = self.shared.stats()
        out.calls.extend(self.calls.recent())
        now = time.monotonic()
        for session in self.sessions:
            out.session_details.add(
                client_name=session.name,
                namespace=session.namespace,
                age_seconds=now - session.opened_at,
                leased_chunks=sum(len(hold.chunks) for hold in session.leases.values()),
                reservations=len(session.reservations),
                staging_used_bytes=session.staging.used_bytes if session.staging is not None else 0,
                descriptor=session.descriptor,
            )
        return out

    async def _await_pin(self, done: str) -> None:
        """Wait until a change of pins is on disk. Raises StoreUnavailable."""
        if not await self.store.tiers.await_notes(_WRITTEN_SECONDS):
            why = (self.store.failing or ("the disk does not answer in time",))[0]
            raise StoreUnavailable(
                f"the prefix is {done}, but the durable store has not written that yet ({why}): it is lost if the "
                "daemon is killed now"
            )

    def _prefix(self, prefix: pb.PrefixRef, context: Context) -> tuple[bytes, bytes]:
        return self._root(prefix, context), request_validation.check_hash("prefix_hash", prefix.prefix_hash)

    def _caller(self, context: Context, client: str) -> str:
        """Return the name of the caller whose pin limits apply; empty for the daemon's own user.

        ``client`` is the name that a gateway on the private socket sends for its client. Raises InvalidRequest for a
        name on another listener.
        """
        caller = self.external_caller(context)
        if caller is None:
            return request_validation.check_caller(client)
        if client:
            raise InvalidRequest("caller is set; only a gateway at the private socket may name a client")
        return caller.name

    def _root(self, prefix: pb.PrefixRef, context: Context) -> bytes:
        if not prefix.root:
            return self.root(context, prefix.namespace, prefix.tenant_salt)
        self.principal_of(context).require_operator("name a tenant by its root")
        return request_validation.check_hash("root", prefix.root)
