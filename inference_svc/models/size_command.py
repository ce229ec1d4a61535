"""``kvsidecar size``: computes arena, store and pool for a model, a context length and a number of sessions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from kvsidecar.byte_sizes import format_size
from kvsidecar.chunk_layout import KEY_GROUP_TOKENS, Geometry, layout
from kvsidecar.cli.flags import FlagParser
from kvsidecar.errors import KVSidecarError
from rich.console import Console
from rich.table import Table

from inference_svc.models.kv_geometry import DTYPES, geometry_of

_CHUNK_TOKENS, _PAGE_BYTES, _MIB = 128, 4096, 1 << 20
_STAGING_BYTES, _DAEMON_BYTES = 256 << 20, 128 << 20
_MAX_TOKENS, _MAX_SESSIONS = 100_000_000, 10_000_000

_ABOUT = """Compute what to plan for a node.

Each token of a session has keys and values in all layers. They are kept in three places: the KV pool of a worker while
a request runs, the arena (shared memory of the cache daemon) for fast reuse, and the store on disk. A session whose
chunks are in the arena or the store begins its next turn without computing its context again.

The arena that holds all sessions is the fastest. The smallest sensible one holds the running requests; the other
sessions are then read from disk, which still beats computing. Storing at 8 or 4 bits (--storage-bits) needs a half or a
quarter, and changes some answers."""


@dataclass(frozen=True)
class SizePlan:
    """Bytes to plan for a node."""

    bytes_per_token: dict[int, int]  # for each width of stored elements in bits
    arena_bytes: int  # enough for all sessions
    min_arena_bytes: int  # enough for the running requests
    store_bytes: int
    max_file_bytes: int
    pool_bytes: int  # per worker
    staging_bytes: int  # per worker
    memory_bytes: int  # whole node with an arena of ``arena_bytes``, without the model's weights


def plan_of(geometry: Geometry, context: int, sessions: int, running: int, workers: int, bits: int) -> SizePlan:
    """Compute the plan of a node whose sessions have ``context`` tokens each."""
    stored = _chunk_bytes(geometry, bits)
    chunks = -(-context // _CHUNK_TOKENS)
    pool = -(-running // workers) * context * (_chunk_bytes(geometry, 16) // _CHUNK_TOKENS)
    arena, store = _rounded(sessions * chunks * _in_pages(stored)), _rounded(sessions * chunks * stored)
    return SizePlan(
        bytes_per_token={width: -(-_chunk_bytes(geometry, width) // _CHUNK_TOKENS) for width in KEY_GROUP_TOKENS},
        arena_bytes=arena,
        min_arena_bytes=min(arena, _rounded(running * chunks * _in_pages(stored))),
        store_bytes=store,
        max_file_bytes=store * 3 // 2,
        pool_bytes=_rounded(pool),
        staging_bytes=_STAGING_BYTES,
        memory_bytes=arena + _DAEMON_BYTES + workers * (_STAGING_BYTES + _rounded(pool)),
    )


def _chunk_bytes(geometry: Geometry, bits: int) -> int:
    return layout(replace(geometry, bits=bits), _CHUNK_TOKENS, KEY_GROUP_TOKENS[bits], 0).size_bytes


def _in_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _rounded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // _MIB)) * _MIB


def main(arguments: list[str]) -> int:
    """Return the exit code: 0, or 2 if the model is not found."""
    options = _parser().parse_args(arguments)
    name, running = options.model or options.named, options.running or min(options.sessions, 8)
    try:
        if not name:
            raise KVSidecarError("name a model: kvsidecar size MODEL --context N --sessions N")
        geometry = geometry_of(name, options.dtype)
    except KVSidecarError as error:
        print(f"kvsidecar size: {error}", file=sys.stderr)
        return 2
    plan = plan_of(geometry, options.context, options.sessions, running, options.workers, options.storage_bits)
    if options.json:
        print(json.dumps(asdict(plan), indent=1))
        return 0
    console = Console()
    console.print(_table(plan, geometry, options, running))
    flags = [f"--arena-bytes {plan.arena_bytes // _MIB}MiB", f"--store-bytes {plan.store_bytes // _MIB}MiB"]
    flags += [f"--pool-bytes {plan.pool_bytes // _MIB}MiB"]
    flags += [f"--workers {options.workers}"] if options.workers > 1 else []
    flags += [f"--storage-bits {options.storage_bits}"] if options.storage_bits != 16 else []
    console.print(f"kvsidecar serve {name} {' '.join(flags)}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _table(plan: SizePlan, geometry: Geometry, options: argparse.Namespace, running: int) -> Table:
    dtype = next(name for name, value in DTYPES.items() if value == geometry.dtype)
    tokens = options.context * options.sessions
    kept = f"{options.sessions:,} sessions of {options.context:,} tokens"
    table = Table(show_header=False)
    per_token = {"as computed" if bits == 16 else f"at {bits} bits": n for bits, n in plan.bytes_per_token.items()}
    table.add_row("a token", " · ".join(f"{format_size(n)} {width}" for width, n in per_token.items()),
                  f"2 · {geometry.layers} layers · {geometry.kv_heads} heads · {geometry.head_dim} channels, {dtype}; "
                  "CPUs without native bfloat16 compute in float32: --dtype float32")  # fmt: skip
    table.add_row("arena, all in memory", format_size(plan.arena_bytes), f"{kept}: {tokens:,} tokens")
    table.add_row(
        "arena, at least", format_size(plan.min_arena_bytes), f"{running:,} running requests; the rest on disk"
    )
    table.add_row(
        "store", format_size(plan.store_bytes), f"{kept}; the file may take {format_size(plan.max_file_bytes)}"
    )
    table.add_row("KV pool of a worker", format_size(plan.pool_bytes),
                  f"{-(-running // options.workers):,} requests at a time; more wait")  # fmt: skip
    table.add_row(
        "staging of a worker", format_size(plan.staging_bytes), "new chunks that the daemon has not copied yet"
    )
    table.add_row("memory", format_size(plan.memory_bytes),
                  f"the large arena, {format_size(_DAEMON_BYTES)} for the daemon, pool and staging of every worker "
                  f"({options.workers}); the model's weights come on top")  # fmt: skip
    return table


def _parser() -> FlagParser:
    parser = FlagParser(prog="kvsidecar size", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("named", nargs="?", metavar="MODEL", help="as kvsidecar serve takes it; nothing is loaded")
    parser.add_argument("--model", help="the same")
    parser.add_argument("--context", type=_number("context", _MAX_TOKENS), required=True, metavar="TOKENS",
                        help="tokens of a session: its prompt with all turns, and the answer")  # fmt: skip
    parser.add_argument("--sessions", type=_number("sessions", _MAX_SESSIONS), required=True, metavar="N",
                        help="sessions whose context is to be kept for their next turn")  # fmt: skip
    parser.add_argument("--running", type=_number("running", _MAX_SESSIONS), default=0, metavar="N",
                        help="requests that run at the same time (default: 8, at most the sessions)")  # fmt: skip
    parser.add_argument(
        "--workers", type=_number("workers", 64), default=1, metavar="N", help="as of serve (default 1)"
    )
    parser.add_argument("--storage-bits", type=int, choices=tuple(KEY_GROUP_TOKENS), default=16,
                        help="bits of stored elements, as of serve (default 16: answers do not change)")  # fmt: skip
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto",
                        help="the type that the model computes in; auto: the checkpoint's")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    return parser


def _number(name: str, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{name} is {text!r}; allowed are 1 to {most:,}")
        return int(text)

    return parse
