"""``kvsidecar cache list`` and ``show``: inspect stored chunks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import grpc
import typer
from rich.markup import escape
from rich.table import Table

from kvsidecar import keys
from kvsidecar.byte_sizes import format_size
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.cli.cache.daemon_target import CALL_SECONDS, AsJson, Namespace, Salt, at_daemon, salt_bytes, scope
from kvsidecar.cli.cache.output_format import as_dict, duration, print_json, where
from kvsidecar.cli.printable import for_stream
from kvsidecar.cli.terminal import TerminalConsole
from kvsidecar.client import Client
from kvsidecar.errors import InvalidRequest, PermissionDenied, from_rpc

_PAGE = 1000
_SHORT = 12
_COLUMNS = (
    "chunk", "parent", "root", "workers", "position", "tokens", "bits", "payload_bytes", "stored_bytes", "where",
    "leases", "hits", "idle_seconds",
)  # fmt: skip
_SUMS = ("chunks", "tokens", "payload_bytes", "stored_bytes")
_NARROW = ("chunk", "of", "tokens", "size", "where", "hits")
_WIDE = ("chunk", "of", "position", "tokens", "bits", "size", "where", "leases", "hits", "idle")
_WIDE_FROM = 118

ChunkName = Annotated[str, typer.Argument(help="The chunk's hash, or its first digits, from `cache list`.")]


@at_daemon
def list_chunks(
    daemon: Any,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of chunks; 0 shows all.")] = 100,
    roots: Annotated[bool, typer.Option("--roots", help="One line per tenant root, with its sums.")] = False,
    json: AsJson = False,
    namespace: Namespace = "",
    salt: Salt = "",
) -> None:
    """List stored chunks: a table on a terminal, else tab-separated lines with full hashes.

    `workers` (in a table `of`) names the attached workers that use a chunk, for chunks without a salt or of --salt.
    Other chunks have the first digits of their tenant root there. `cache show` shows a chunk's text.
    """
    if roots:
        _list_roots(chunks(daemon, namespace, salt), _workers(daemon, salt), json)
        return
    found = chunks(daemon, namespace, salt)
    shown = list(islice(found, limit or None))
    more = next(found, None) is not None
    known = _workers(daemon, salt)
    if json:
        print_json([{**as_dict(c), "workers": known.get(c.root, [])} for c in shown])
    elif sys.stdout.isatty():
        _print_table(shown, known)
    else:
        _print_lines(shown, known)
    if more:
        print(f"there are more than these {limit}; --limit 0 shows all", file=sys.stderr)


def chunks(daemon: Any, namespace: str = "", salt: str = "") -> Iterator[pb.ChunkInfo]:
    """Yield all stored chunks, or a tenant's, page by page."""
    token, restricted = b"", scope(namespace, salt)
    while True:
        request = pb.ListRequest(page_size=_PAGE, page_token=token, **restricted)
        page = daemon.List(request, timeout=CALL_SECONDS)
        yield from page.chunks
        token = page.next_page_token
        if not token:
            return


def _list_roots(found: Iterator[pb.ChunkInfo], known: dict[bytes, list[str]], json: bool) -> None:
    """Print the sums of each tenant root, the largest first."""
    sums: dict[bytes, dict[str, Any]] = {}
    for c in found:
        row = sums.setdefault(
            c.root, {"root": c.root.hex(), "workers": known.get(c.root, []), **dict.fromkeys(_SUMS, 0)}
        )
        row["chunks"] += 1
        for name in _SUMS[1:]:
            row[name] += getattr(c, name)
        row["idle_seconds"] = min(row.get("idle_seconds", c.idle_seconds), c.idle_seconds)
    rows = sorted(sums.values(), key=lambda row: -row["payload_bytes"])
    if json:
        print_json(rows)
        return
    print("\t".join(("root", "workers", *_SUMS, "idle_seconds")))
    for row in rows:
        values = ",".join(row["workers"]), *(row[name] for name in _SUMS), f"{row['idle_seconds']:.1f}"
        print("\t".join(map(str, (row["root"], *values))))


def find_root(daemon: Any, beginning: str) -> bytes:
    """Find the tenant root by its first digits. Raises InvalidRequest unless exactly one matches."""
    found = {c.root for c in chunks(daemon) if c.root.hex().startswith(beginning.lower())}
    if len(found) != 1:
        raise InvalidRequest(f"{len(found) or 'no'} tenant roots begin with {beginning!r}; see `cache list --roots`")
    return found.pop()


def find(daemon: Any, beginning: str, namespace: str = "", salt: str = "") -> pb.ChunkInfo:
    """Find the chunk by its hash prefix. Raises InvalidRequest unless exactly one matches."""
    found = [c for c in chunks(daemon, namespace, salt) if c.prefix_hash.hex().startswith(beginning.lower())]
    if not found:
        raise InvalidRequest(f"no chunk begins with {beginning!r}; `cache list` shows which there are")
    if len(found) > 1:
        raise InvalidRequest(
            f"{len(found)} chunks begin with {beginning!r}; give more of the hash that `cache list` shows"
        )
    return found[0]


def prefix_of(chunk: pb.ChunkInfo, namespace: str, salt: str) -> pb.PrefixRef:
    """Return a reference to a chunk of a tenant; without a namespace, by the chunk's own root (operators only)."""
    restricted = scope(namespace, salt) or {"root": chunk.root}
    return pb.PrefixRef(prefix_hash=chunk.prefix_hash, **restricted)


@at_daemon
def show(
    daemon: Any,
    chunk: ChunkName,
    worker: Annotated[
        str | None, typer.Option(help="Socket or host:port of a worker of this model, which detokenizes the chunk.")
    ] = None,
    json: AsJson = False,
    namespace: Namespace = "",
    salt: Salt = "",
) -> None:
    """Show one chunk: its tiers, its use and, with --worker, its text.

    The text needs the chunk's namespace and salt. For the common tenant of an attached worker the command finds both.
    """
    found = find(daemon, chunk, namespace, salt if namespace else "")
    details = as_dict(found)
    details["workers"] = _workers(daemon, salt).get(found.root, [])
    if worker is not None:
        header = _header(daemon, found, namespace, salt)
        with Client(worker) as client:
            details["model"] = client.model().model_id
            details["text"] = client.detokenize(list(header.token_ids))
    if json:
        print_json(details)
        return
    for name, value in details.items():
        label = name.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")
        print(for_stream(f"{label + ':':<20}{_readable(name, value)}", sys.stdout))


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    if name.endswith("_bytes"):
        return format_size(value)
    return duration(value) if name.endswith("_seconds") else str(value)


def _header(daemon: Any, chunk: pb.ChunkInfo, namespace: str, salt: str) -> ChunkHeader:
    """Fetch a chunk with its tokens, which promotes it into the arena."""
    tenant = scope(namespace, salt) if namespace else {}
    if not tenant:
        sessions = daemon.Stats(pb.StatsRequest(), timeout=CALL_SECONDS).session_details
        known = {keys.tenant_root(s.namespace, salt_bytes(salt)): s.namespace for s in sessions}
        if chunk.root not in known:
            raise InvalidRequest("no attached worker's chunks look like this one; give its --namespace and --salt")
        tenant = {"namespace": known[chunk.root], "tenant_salt": salt_bytes(salt)}
    call = daemon.Fetch(pb.FetchRequest(prefix_hash=chunk.prefix_hash, **tenant), timeout=CALL_SECONDS)
    try:
        header: ChunkHeader = next(call).header
        return header
    finally:
        call.cancel()


def _workers(daemon: Any, salt: str) -> dict[bytes, list[str]]:
    """Return attached workers by tenant root; empty for callers that may not see them."""
    try:
        found = daemon.Stats(pb.StatsRequest(), timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        if isinstance(from_rpc(error), PermissionDenied):
            return {}
        raise
    out: dict[bytes, list[str]] = {}
    for session in found.session_details:
        for known in {b"", salt_bytes(salt)}:
            out.setdefault(keys.tenant_root(session.namespace, known), []).append(session.client_name)
    return {root: sorted(set(names)) for root, names in out.items()}


def _print_table(found: list[pb.ChunkInfo], known: dict[bytes, list[str]]) -> None:
    """Choose the columns that fit the terminal's width, the most important columns first."""
    console = TerminalConsole()
    cells = [_cells(c, known) for c in found]
    names = _WIDE if console.width >= _WIDE_FROM else _NARROW
    table = Table(*names)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column.header in ("chunk", "of", "where") else "right"
    for row in cells:
        table.add_row(*(row[name] for name in names))
    console.print(table)


def _cells(c: pb.ChunkInfo, known: dict[bytes, list[str]]) -> dict[str, str]:
    workers = known.get(c.root, [])
    more = f" +{len(workers) - 1}" if len(workers) > 1 else ""
    return {
        "chunk": c.prefix_hash.hex()[:_SHORT],
        "of": escape(workers[0][:_SHORT]) + more if workers else c.root.hex()[:8],
        "position": str(c.start_position),
        "tokens": str(c.tokens),
        "bits": str(c.bits),
        "size": format_size(c.payload_bytes),
        "where": where(c),
        "leases": str(c.leases),
        "hits": str(c.hits),
        "idle": duration(c.idle_seconds),
    }


def _print_lines(found: list[pb.ChunkInfo], known: dict[bytes, list[str]]) -> None:
    print("\t".join(_COLUMNS))
    for c in found:
        row = (
            c.prefix_hash.hex(), c.parent_prefix_hash.hex(), c.root.hex(), ",".join(known.get(c.root, [])),
            c.start_position, c.tokens, c.bits, c.payload_bytes, c.stored_bytes, where(c), c.leases, c.hits,
            f"{c.idle_seconds:.1f}",
        )  # fmt: skip
        print("\t".join(map(str, row)))
