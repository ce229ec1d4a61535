"""Copies a tenant's chunks from one daemon to another, by Fetch and Store.

Both daemons verify each chunk's checksum, and the target stores a chunk as if a local worker had computed it. A TTL is
transferred as its remaining time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import grpc

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader, NamespaceDescriptor
from kvsidecar.chunk_layout import MAX_TTL_SECONDS
from kvsidecar.errors import ChunkNotFound, InvalidRequest, Overloaded, from_rpc

_PAGE = 1000
_NUM_THREADS = 4  # enough to saturate the link; a daemon serves many more streams
_CALL_SECONDS = 120.0
# The chunk lists of the two daemons are read one after the other, so an expiry that is this much later counts as equal.
_SLACK_SECONDS = 5.0


@dataclass(frozen=True)
class TenantScope:
    """A tenant: namespace (32 bytes) and salt."""

    namespace: bytes
    salt: bytes = b""


@dataclass(frozen=True)
class TransferResult:
    """Result of a transfer.

    ``known`` chunks were already at the target. ``lost`` chunks were evicted before they could be fetched, had expired,
    had no parent at one of the daemons, or were being written to the target by another client.
    """

    chunks: int = 0
    payload_bytes: int = 0
    known: int = 0
    lost: int = 0


@dataclass(frozen=True)
class _ListedChunk:
    """A chunk and its expiry (``time.monotonic``; infinite without a TTL)."""

    info: pb.ChunkInfo
    ends_at: float


def descriptor_of(namespace: bytes, *daemons: Any) -> NamespaceDescriptor:
    """Return a namespace's descriptor, from a worker attached to one of these daemons.

    Raises InvalidRequest when no worker of the namespace is attached, and grpc.RpcError.
    """
    for daemon in daemons:
        try:
            sessions = daemon.Stats(pb.StatsRequest(), timeout=_CALL_SECONDS).session_details
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:  # guests may not see sessions
                raise
            continue
        for session in sessions:
            if session.namespace == namespace:
                found: NamespaceDescriptor = session.descriptor
                return found
    raise InvalidRequest(
        f"no worker of the namespace {namespace.hex()} is attached to {'either' if len(daemons) > 1 else 'the'} "
        f"daemon, or you may not see it; start one, and be an operator at its daemon"
    )


def transfer_tenant(
    source: Any,
    target: Any,
    tenant: TenantScope,
    descriptor: NamespaceDescriptor,
    heard: Callable[[int, int], None] = lambda done, total: None,
) -> TransferResult:
    """Copy a tenant's chunks that ``target`` lacks, or has with an earlier expiry.

    ``source`` and ``target`` are stubs. Copies level by level, parents before children. Calls ``heard(done, total)``
    after each level. Raises KVSidecarErrors; chunks that were copied before an error stay.
    """
    there = {chunk.info.prefix_hash: chunk.ends_at for chunk in _listed(target, tenant)}
    found = _listed(source, tenant)
    missing = [chunk for chunk in found if chunk.ends_at > there.get(chunk.info.prefix_hash, -inf) + _SLACK_SECONDS]
    root = _root_for_operator(source, tenant)
    carried, lost = TransferResult(known=len(found) - len(missing)), set[bytes]()
    done = 0
    with ThreadPoolExecutor(_NUM_THREADS, "carry") as threads:
        for wave in _waves(missing):
            sent = [chunk for chunk in wave if chunk.info.parent_prefix_hash not in lost]
            outcomes = threads.map(lambda chunk: _carry_one(source, target, tenant, root, descriptor, chunk), sent)
            gone = {chunk.info.prefix_hash for chunk in wave} - {chunk.info.prefix_hash for chunk in sent}
            for chunk, size in zip(sent, outcomes, strict=True):
                if size is None:
                    gone.add(chunk.info.prefix_hash)
                elif size:
                    carried = replace(carried, chunks=carried.chunks + 1, payload_bytes=carried.payload_bytes + size)
                else:
                    carried = replace(carried, known=carried.known + 1)
            lost |= gone
            carried = replace(carried, lost=len(lost))
            done += len(wave)
            heard(done, len(missing))
    return carried


def _waves(chunks: list[_ListedChunk]) -> Iterator[list[_ListedChunk]]:
    """Yield chunks in waves, parents first.

    The first wave has the chunks whose parents are not in ``chunks``, the second wave their children, and so on.
    """
    names = {chunk.info.prefix_hash for chunk in chunks}
    children: dict[bytes, list[_ListedChunk]] = defaultdict(list)
    for chunk in chunks:
        children[chunk.info.parent_prefix_hash].append(chunk)
    wave = [chunk for chunk in chunks if chunk.info.parent_prefix_hash not in names]
    while wave:
        yield wave
        wave = [child for chunk in wave for child in children[chunk.info.prefix_hash]]


def _listed(daemon: Any, tenant: TenantScope) -> list[_ListedChunk]:
    found, token = list[_ListedChunk](), b""
    while True:
        request = pb.ListRequest(namespace=tenant.namespace, tenant_salt=tenant.salt, page_size=_PAGE, page_token=token)
        try:
            page = daemon.List(request, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        now = time.monotonic()
        found += [
            _ListedChunk(chunk, now + chunk.ttl_seconds if chunk.HasField("ttl_seconds") else inf)
            for chunk in page.chunks
        ]
        token = page.next_page_token
        if not token:
            return found


def _root_for_operator(source: Any, tenant: TenantScope) -> bytes:
    """Return the tenant's root if the caller is an operator at the source, else nothing.

    A Fetch by the root, which only operators may name, promotes no chunk and does not count as a use.
    """
    try:
        source.Stats(pb.StatsRequest(), timeout=_CALL_SECONDS)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
            raise from_rpc(error) from error
        return b""
    return keys.tenant_root(tenant.namespace, tenant.salt)


def _carry_one(
    source: Any,
    target: Any,
    tenant: TenantScope,
    root: bytes,
    descriptor: NamespaceDescriptor,
    listed: _ListedChunk,
) -> int | None:
    """Copy one chunk; return its payload's bytes. ``root`` is for the Fetch; see ``_root_for_operator``.

    Returns 0 when the target already had the chunk, None when the chunk or its parent no longer exists. Raises
    KVSidecarErrors.
    """
    chunk, left = listed.info, listed.ends_at - time.monotonic()
    if left <= 0:
        return None
    ttl = 0 if left == inf else min(MAX_TTL_SECONDS, ceil(left))
    request = pb.FetchRequest(
        namespace=tenant.namespace, tenant_salt=tenant.salt, prefix_hash=chunk.prefix_hash, root=root
    )
    fetched = source.Fetch(request, timeout=_CALL_SECONDS)
    failed: list[grpc.RpcError] = []
    header = ChunkHeader()
    try:
        header = next(fetched).header
        stored = target.Store(_pieces(fetched, header, tenant, descriptor, ttl, failed), timeout=_CALL_SECONDS)
        if stored.already_stored:
            return 0
        return None if failed or stored.prefix_hash != chunk.prefix_hash else int(header.payload_bytes)
    except grpc.RpcError as error:
        kind = from_rpc(failed[0] if failed else error)
        if isinstance(kind, ChunkNotFound | Overloaded) or _has_no_parent(target, tenant, chunk):
            return None
        raise kind from error
    finally:
        fetched.cancel()


def _pieces(
    fetched: Any,
    header: ChunkHeader,
    tenant: TenantScope,
    descriptor: NamespaceDescriptor,
    ttl_seconds: int,
    failed: list[grpc.RpcError],
) -> Iterator[pb.StoreRequest]:
    """Yield the requests of a Store.

    gRPC consumes the requests on its own thread. If reading from the source fails, gRPC reports no cause to the caller,
    so the cause is appended to ``failed``.
    """
    start = pb.StoreStart(descriptor=descriptor, tenant_salt=tenant.salt, header=header, ttl_seconds=ttl_seconds)
    yield pb.StoreRequest(start=start)
    try:
        for message in fetched:
            yield pb.StoreRequest(data=message.data)
    except grpc.RpcError as error:
        failed.append(error)


def _has_no_parent(target: Any, tenant: TenantScope, chunk: pb.ChunkInfo) -> bool:
    """Return whether the daemon reports that a chunk's parent is not stored."""
    parent = chunk.parent_prefix_hash
    if parent == keys.tenant_root(tenant.namespace, tenant.salt):
        return False
    request = pb.FetchRequest(namespace=tenant.namespace, tenant_salt=tenant.salt, prefix_hash=parent)
    call = target.Fetch(request, timeout=_CALL_SECONDS)
    try:
        next(call)
    except grpc.RpcError as error:
        return isinstance(from_rpc(error), ChunkNotFound)
    finally:
        call.cancel()
    return False
