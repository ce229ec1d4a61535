"""``kvsidecar cache watch``: prints changes of the store as they happen."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated, Any

import typer

from kvsidecar.byte_sizes import format_size
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cli.cache.daemon_target import Namespace, Salt, at_daemon, scope
from kvsidecar.cli.cache.output_format import as_dict, print_json, where

_PREFIX = "EVENT_TYPE_"


@at_daemon
def watch(
    daemon: Any,
    json: Annotated[bool, typer.Option("--json", help="One JSON document per line; the first confirms.")] = False,
    events: Annotated[int, typer.Option(min=0, help="Quit after this many events; 0 runs until Ctrl-C.")] = 0,
    namespace: Namespace = "",
    salt: Salt = "",
) -> None:
    """Print changes of the store: committed, persisted, promoted, demoted, evicted, deleted."""
    call = daemon.Watch(pb.WatchRequest(**scope(namespace, salt)))
    seen = 0
    with contextlib.suppress(KeyboardInterrupt):
        for event in call:
            if event.sequence_number:
                seen += 1
                _show(event, json)
            elif json:
                print_json({"epoch": event.epoch}, indent=None)
            if events and seen == events:
                break
    call.cancel()


def _show(event: pb.WatchResponse, json: bool) -> None:
    kind = pb.EventType.Name(event.type).removeprefix(_PREFIX).lower()
    if json:
        print_json({"sequence_number": event.sequence_number, "type": kind, "chunk": as_dict(event.chunk)}, indent=None)
        return
    c = event.chunk
    print(
        f"{time.strftime('%H:%M:%S')} {event.sequence_number:>8} {kind:<9} {c.prefix_hash.hex()[:12]} "
        f"{c.tokens:>6} tokens at {c.start_position:<7} {format_size(c.payload_bytes):>10} {where(c)}",
        flush=True,
    )
