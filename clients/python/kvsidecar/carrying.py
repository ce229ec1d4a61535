"""Chunks carried from one daemon to another, by Fetch and Store: each is checked by its checksum at both ends, and is
stored there as if it had been read there."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import grpc

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader, NamespaceDescriptor
from kvsidecar.errors import ChunkNotFound, InvalidRequest, Overloaded, from_rpc

_PAGE = 1000
_AT_ONCE = 4  # a daemon serves many more streams; the link is full before that
_CALL_SECONDS = 120.0


@dataclass(frozen=True)
class Tenant:
    """Of a namespace, 32 bytes."""

    namespace: bytes
    salt: bytes = b""


@dataclass(frozen=True)
class Carried:
    """``known`` chunks were there already; ``lost`` ones were evicted before they could be fetched, or their beginning
    was, at one end or the other, or somebody else was writing them there."""

    chunks: int = 0
    payload_bytes: int = 0
    known: int = 0
    lost: int = 0


def descriptor_of(namespace: bytes, *daemons: Any) -> NamespaceDescriptor:
    """What the chunks of a namespace look like, as workers said that are attached to one of these daemons. Raises
    InvalidRequest when no worker of the namespace is, grpc.RpcError."""
    for daemon in daemons:
        try:
            sessions = daemon.Stats(pb.StatsRequest(), timeout=_CALL_SECONDS).session_details
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:  # guests are not told
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


def carry(
    source: Any,
    target: Any,
    tenant: Tenant,
    descriptor: NamespaceDescriptor,
    heard: Callable[[int, int], None] = lambda done, total: None,
) -> Carried:
    """Stores at ``target`` what ``source`` has of a tenant and ``target`` has not; both are stubs. Parents go before
    children. ``heard`` is told of the chunks that are done. Raises KVSidecarErrors; what was carried until then stays.
    """
    there = {chunk.prefix_hash for chunk in _listed(target, tenant)}
    found = _listed(source, tenant)
    missing = [chunk for chunk in found if chunk.prefix_hash not in there]
    carried, lost = Carried(known=len(found) - len(missing)), set[bytes]()
    done = 0
    with ThreadPoolExecutor(_AT_ONCE, "carry") as threads:
        for wave in _waves(missing):
            sent = [chunk for chunk in wave if chunk.parent_prefix_hash not in lost]
            outcomes = threads.map(lambda chunk: _carry_one(source, target, tenant, descriptor, chunk), sent)
            gone = {chunk.prefix_hash for chunk in wave} - {chunk.prefix_hash for chunk in sent}
            for chunk, size in zip(sent, outcomes, strict=True):
                if size is None:
                    gone.add(chunk.prefix_hash)
                    continue
                carried = replace(carried, chunks=carried.chunks + 1, payload_bytes=carried.payload_bytes + size)
            lost |= gone
            carried = replace(carried, lost=len(lost))
            done += len(wave)
            heard(done, len(missing))
    return carried


def _waves(chunks: list[pb.ChunkInfo]) -> Iterator[list[pb.ChunkInfo]]:
    """Those that continue nothing of these, then their children, and so on."""
    names = {chunk.prefix_hash for chunk in chunks}
    children: dict[bytes, list[pb.ChunkInfo]] = defaultdict(list)
    for chunk in chunks:
        children[chunk.parent_prefix_hash].append(chunk)
    wave = [chunk for chunk in chunks if chunk.parent_prefix_hash not in names]
    while wave:
        yield wave
        wave = [child for chunk in wave for child in children[chunk.prefix_hash]]


def _listed(daemon: Any, tenant: Tenant) -> list[pb.ChunkInfo]:
    found, token = list[pb.ChunkInfo](), b""
    while True:
        request = pb.ListRequest(namespace=tenant.namespace, tenant_salt=tenant.salt, page_size=_PAGE, page_token=token)
        try:
            page = daemon.List(request, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        found += page.chunks
        token = page.next_page_token
        if not token:
            return found


def _carry_one(
    source: Any, target: Any, tenant: Tenant, descriptor: NamespaceDescriptor, chunk: pb.ChunkInfo
) -> int | None:
    """Bytes of the payload; None when the chunk, or what it continues, is gone. Raises KVSidecarErrors."""
    request = pb.FetchRequest(namespace=tenant.namespace, tenant_salt=tenant.salt, prefix_hash=chunk.prefix_hash)
    fetched = source.Fetch(request, timeout=_CALL_SECONDS)
    failed: list[grpc.RpcError] = []
    header = ChunkHeader()
    try:
        header = next(fetched).header
        stored = target.Store(_pieces(fetched, header, tenant, descriptor, failed), timeout=_CALL_SECONDS)
        return None if failed or stored.prefix_hash != chunk.prefix_hash else int(header.payload_bytes)
    except grpc.RpcError as error:
        kind = from_rpc(failed[0] if failed else error)
        if isinstance(kind, ChunkNotFound | Overloaded) or _has_no_parent(target, tenant, chunk):
            return None
        raise kind from error
    finally:
        fetched.cancel()


def _pieces(
    fetched: Any, header: ChunkHeader, tenant: Tenant, descriptor: NamespaceDescriptor, failed: list[grpc.RpcError]
) -> Iterator[pb.StoreRequest]:
    """What Store is sent. gRPC reads it on a thread of its own and would only say that it failed: why is ``failed``."""
    yield pb.StoreRequest(start=pb.StoreStart(descriptor=descriptor, tenant_salt=tenant.salt, header=header))
    try:
        for message in fetched:
            yield pb.StoreRequest(data=message.data)
    except grpc.RpcError as error:
        failed.append(error)


def _has_no_parent(target: Any, tenant: Tenant, chunk: pb.ChunkInfo) -> bool:
    """Whether what a chunk continues is not stored."""
    parent = chunk.parent_prefix_hash
    if parent == keys.tenant_root(tenant.namespace, tenant.salt):
        return False
    request = pb.FetchRequest(namespace=tenant.namespace, tenant_salt=tenant.salt, prefix_hash=parent)
    call = target.Fetch(request, timeout=_CALL_SECONDS)
    with contextlib.suppress(grpc.RpcError):
        next(call)
        call.cancel()
        return False
    return True
