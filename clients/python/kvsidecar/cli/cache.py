"""``kvsidecar cache``: look at the daemon and tell it what to keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table

from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.client import target_of
from kvsidecar.errors import InvalidRequest, from_rpc
from kvsidecar.runtime import default_runtime_dir
from kvsidecar.sizes import format_size

app = typer.Typer(no_args_is_help=True, help="Look at the cache daemon, and pin or delete what it holds.")
console = Console()
Socket = Annotated[str | None, typer.Option("--socket", help="The daemon's socket or host:port.")]
_SECONDS = 10


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """A stub of the daemon; its failures become KVSidecarErrors."""
    target = target_of(address or default_runtime_dir() / "cache.sock")
    with grpc.insecure_channel(target) as channel:
        try:
            yield CacheServiceStub(channel)
        except grpc.RpcError as error:
            raise from_rpc(error) from error


@app.command()
def stats(socket: Socket = None) -> None:
    """Counters and gauges."""
    with connect(socket) as stub:
        found = stub.Stats(pb.StatsRequest(), timeout=_SECONDS)
    table = Table(show_header=False)
    for field in found.DESCRIPTOR.fields:
        value = getattr(found, field.name)
        shown = format_size(value) if field.name.endswith("bytes") else f"{value:,.0f}"
        table.add_row(field.name.replace("_", " "), f"{value:x}" if field.name == "epoch" else shown)
    asked = found.requested_tokens
    table.add_row("token hit ratio", f"{found.matched_tokens / asked:.3f}" if asked else "no requests yet")
    console.print(table)


@app.command("list")
def list_chunks(socket: Socket = None, limit: Annotated[int, typer.Option(help="Most chunks to show.")] = 100) -> None:
    """Stored chunks."""
    table = Table("root", "chunk", "position", "tokens", "bits", "size", "where", "leases", "hits")
    token, shown = b"", 0
    with connect(socket) as stub:
        while shown < limit:
            page = stub.List(pb.ListRequest(page_size=min(1000, limit - shown), page_token=token), timeout=_SECONDS)
            for c in page.chunks:
                tiers = [name for name, on in (("arena", c.resident), ("disk", c.durable), ("pinned", c.pinned)) if on]
                table.add_row(
                    c.root.hex()[:12],
                    c.prefix_hash.hex(),
                    str(c.start_position),
                    str(c.tokens),
                    str(c.bits),
                    format_size(c.payload_bytes),
                    "+".join(tiers),
                    str(c.leases),
                    str(c.hits),
                )
            shown += len(page.chunks)
            token = page.next_page_token
            if not token:
                break
    console.print(table)


def _find(stub: Any, chunk: str) -> pb.PrefixRef:
    """The chunk whose hash begins with ``chunk``. Raises InvalidRequest unless there is exactly one."""
    found, token = [], b""
    while True:
        page = stub.List(pb.ListRequest(page_size=1000, page_token=token), timeout=_SECONDS)
        found += [c for c in page.chunks if c.prefix_hash.hex().startswith(chunk.lower())]
        token = page.next_page_token
        if not token:
            break
    if len(found) != 1:
        raise InvalidRequest(f"{len(found)} chunks begin with {chunk!r}; give more of the hash that `cache list` shows")
    return pb.PrefixRef(namespace=found[0].root, prefix_hash=found[0].prefix_hash)


Chunk = Annotated[str, typer.Argument(help="The chunk's hash, or its beginning, from `cache list`.")]


@app.command()
def pin(chunk: Chunk, socket: Socket = None) -> None:
    """Keep a chunk and all before it, whatever is evicted."""
    with connect(socket) as stub:
        result = stub.Pin(pb.PinRequest(prefix=_find(stub, chunk)), timeout=_SECONDS)
    console.print(f"pinned {result.chunks} chunks")


@app.command()
def unpin(chunk: Chunk, socket: Socket = None) -> None:
    """End a pin."""
    with connect(socket) as stub:
        result = stub.Unpin(pb.UnpinRequest(prefix=_find(stub, chunk)), timeout=_SECONDS)
    console.print(f"unpinned {result.chunks} chunks")


@app.command()
def delete(
    chunk: Annotated[str, typer.Argument(help="The chunk's hash or its beginning; leave out with --all.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Delete all chunks.")] = False,
    socket: Socket = None,
) -> None:
    """Remove a chunk and all that continues it."""
    if bool(chunk) == everything:
        raise InvalidRequest("name one chunk, or say --all")
    with connect(socket) as stub:
        prefix = pb.PrefixRef() if everything else _find(stub, chunk)
        result = stub.Delete(pb.DeleteRequest(prefix=prefix), timeout=_SECONDS)
    console.print(f"deleted {result.deleted} chunks")
