"""``kvsidecar cache stats``: counters of the daemon, or usage of a tenant."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvsidecar.byte_sizes import format_size
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cli.cache.daemon_target import CALL_SECONDS, AsJson, Namespace, Salt, at_daemon, scope
from kvsidecar.cli.cache.hit_ratios import HitRatios
from kvsidecar.cli.cache.output_format import as_dict, duration, percent, print_json
from kvsidecar.cli.terminal import TerminalConsole

_SECTIONS = {
    "what workers served": ("prompts", "prompt_tokens", "cached_tokens", "pool_tokens"),
    "what the daemon was asked": (
        "matches", "requested_tokens", "matched_tokens", "promoted_tokens", "content_tokens", "commits", "refused",
    ),
    "what is stored": (
        "chunks", "tokens", "arena_chunks", "arena_used_bytes", "arena_bytes", "durable_chunks", "durable_bytes",
        "durable_budget_bytes", "durable_file_bytes", "pinned_bytes", "retained_bytes",
    ),
    "the GPU arena": (
        "gpu_chunks", "gpu_arena_used_bytes", "gpu_arena_bytes", "gpu_tokens", "gpu_copies", "gpu_evictions",
    ),
    "what is going on": (
        "sessions", "leases", "reservations", "pending_writes", "loop_stall_ms", "restarts", "oom_kills",
    ),
    "the remote tier": (
        "remote_lookups", "remote_hits", "remote_tokens", "remote_bypassed", "remote_late", "remote_read_bytes",
        "remote_written_bytes", "remote_written_chunks", "remote_pending", "remote_dropped", "remote_deletions",
        "remote_data_losses", "remote_refilling_tenants", "remote_withheld", "remote_restored_deletions",
        "remote_failures", "remote_rejected", "remote_hedged", "remote_opened", "remote_latency_ms",
        "remote_bytes_per_second",
    ),
    "what went": (
        "arena_evictions", "durable_evictions", "expired_chunks", "corrupt_chunks", "failed_writes", "failed_reads",
    ),
}  # fmt: skip
_OF_A_TENANT = (
    "chunks",
    "tokens",
    "arena_chunks",
    "arena_used_bytes",
    "durable_chunks",
    "durable_bytes",
    "pinned_bytes",
    "retained_bytes",
)


@at_daemon
def stats(daemon: Any, json: AsJson = False, namespace: Namespace = "", salt: Salt = "") -> None:
    """Show counters and gauges since the daemon's start; with --namespace a tenant's usage.

    The hit ratio is the cached share of the tokens of all prompts that workers served. It includes hits in the workers'
    own pools, so it agrees with the usage of answers and with the gateway's metrics. Workers report with their
    heartbeats, every 2 s. docs/operations/monitoring.md explains each number, and when to act.
    """
    restricted = scope(namespace, salt)
    found = daemon.Stats(pb.StatsRequest(**restricted), timeout=CALL_SECONDS)
    if restricted:
        kept = {name: value for name, value in as_dict(found).items() if name in _OF_A_TENANT}
        print_json(kept) if json else TerminalConsole().print(_table({"what is stored": _OF_A_TENANT}, found))
        return
    ratios = HitRatios.of(found)
    if json:
        print_json({**as_dict(found), "hit_ratio": ratios.as_dict()})
        return
    absent = {"the remote tier": not found.remote_engine, "the GPU arena": not found.gpu_arena_bytes}
    shown = {title: names for title, names in _SECTIONS.items() if not absent.get(title)}
    table = _table(shown, found)
    table.title = f"epoch {found.epoch:x}, up {duration(found.uptime_seconds)}"
    console = TerminalConsole()
    console.print(table)
    console.print(
        f"hit ratio [bold]{percent(ratios.total)}[/bold] of prompt tokens: "
        f"pool {percent(ratios.pool)}, arena {percent(ratios.arena)}, disk {percent(ratios.disk)}"
        + (f", remote {percent(ratios.remote)}" if found.remote_engine else "")
    )
    if found.durable_failing:
        console.print("[red]the durable tier cannot be written to[/red]:", Text(found.durable_failing), soft_wrap=True)
    if found.remote_failing:
        console.print("[red]the remote tier is not used[/red]:", Text(found.remote_failing), soft_wrap=True)


def _table(sections: dict[str, tuple[str, ...]], found: pb.StatsResponse) -> Table:
    table = Table(show_header=False)
    for title, names in sections.items():
        table.add_row(f"[bold]{title}[/bold]", "")
        for name in names:
            value = getattr(found, name)
            shown = format_size(value) if name.endswith("bytes") else f"{value:,.0f}"
            table.add_row(f"  {name.replace('_', ' ')}", shown)
        table.add_section()
    return table
