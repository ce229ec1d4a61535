"""``kvsidecar cache pin``, ``unpin`` and ``delete``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cli.cache.chunk_list import ChunkName, find, find_root, prefix_of
from kvsidecar.cli.cache.daemon_target import CALL_SECONDS, Namespace, Root, Salt, at_daemon, scope
from kvsidecar.errors import InvalidRequest

_NO_CHUNK = "none has this namespace and salt; `cache list --roots` shows the tenants that have chunks"


@at_daemon
def pin(daemon: Any, chunk: ChunkName, namespace: Namespace = "", salt: Salt = "") -> None:
    """Pin a chunk and its ancestors: they are not evicted. Pins are counted and survive restarts."""
    prefix = prefix_of(find(daemon, chunk, namespace, salt), namespace, salt)
    result = daemon.Pin(pb.PinRequest(prefix=prefix), timeout=CALL_SECONDS)
    print(f"pinned {result.chunks} chunks")


@at_daemon
def unpin(daemon: Any, chunk: ChunkName, namespace: Namespace = "", salt: Salt = "") -> None:
    """Remove one pin."""
    prefix = prefix_of(find(daemon, chunk, namespace, salt), namespace, salt)
    result = daemon.Unpin(pb.UnpinRequest(prefix=prefix), timeout=CALL_SECONDS)
    print(f"unpinned {result.chunks} chunks")


@at_daemon
def delete(
    daemon: Any,
    chunk: Annotated[str, typer.Argument(help="The chunk's hash or its first digits; leave out with --all.")] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all chunks; with --namespace or --root only the tenant's.")
    ] = False,
    root: Root = "",
    namespace: Namespace = "",
    salt: Salt = "",
) -> None:
    """Delete a chunk and all its descendants."""
    if bool(chunk) == everything:
        raise InvalidRequest("name one chunk, or say --all")
    if root and (chunk or namespace or salt):
        raise InvalidRequest("--root names a tenant for --all; give no chunk, --namespace or --salt with it")
    if not everything:
        prefix = prefix_of(find(daemon, chunk, namespace, salt), namespace, salt)
    else:
        tenant = {"root": find_root(daemon, root)} if root else scope(namespace, salt)
        prefix = pb.PrefixRef(**tenant)
    deleted = daemon.Delete(pb.DeleteRequest(prefix=prefix), timeout=10 * CALL_SECONDS).deleted
    print(f"deleted {deleted} chunks" if deleted or not namespace else f"deleted 0 chunks: {_NO_CHUNK}")
