"""``kvsidecar cache top``: live view of the daemon."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import grpc
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvsidecar.byte_sizes import format_size
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cli.cache.daemon_target import CALL_SECONDS, at_daemon
from kvsidecar.cli.cache.hit_ratios import HitRatios
from kvsidecar.cli.cache.output_format import duration, percent
from kvsidecar.cli.terminal import TerminalConsole

_RATE_SECONDS = 10.0  # window of rates and ratios
_MOST_SESSIONS, _MOST_CALLS = 8, 6
_NOTHING = pb.StatsResponse()


@dataclass(frozen=True)
class Sample:
    """A sample of the daemon's statistics."""

    at: float
    stats: pb.StatsResponse


@at_daemon
def top(
    daemon: Any,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, with rates since the daemon's start.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between frames.")] = 1.0,
) -> None:
    """Show hit ratio by tier, bytes, workers, leases, evictions and slowest calls, live. q or Ctrl-C quits.

    Rates and ratios on the left are of the last 10 seconds, those on the right since the daemon's start.
    """
    console = TerminalConsole()
    first = Sample(time.monotonic(), daemon.Stats(pb.StatsRequest(), timeout=CALL_SECONDS))
    if once:
        console.print(frame(first, None))
        return
    with contextlib.suppress(KeyboardInterrupt), _keys() as pressed, Live(console=console, screen=True) as live:
        samples = [first]
        while True:
            live.update(_next_frame(daemon, samples), refresh=True)
            if pressed(interval) == "q":
                return


def _next_frame(daemon: Any, samples: list[Sample]) -> RenderableType:
    """Add a sample to the window; report an absent daemon, and try again."""
    try:
        stats = daemon.Stats(pb.StatsRequest(), timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
        samples.clear()
        return Text(f"the daemon does not answer ({error.code().name}); trying again", style="red")
    if samples and samples[-1].stats.epoch != stats.epoch:
        samples.clear()
    samples.append(Sample(time.monotonic(), stats))
    while len(samples) > 2 and samples[1].at < samples[-1].at - _RATE_SECONDS:
        del samples[0]
    return frame(samples[-1], samples[0] if len(samples) > 1 else None)


def frame(now: Sample, before: Sample | None) -> RenderableType:
    """Render one frame. Without an earlier sample, rates are since the daemon's start."""
    stats = now.stats
    past = before.stats if before is not None else _NOTHING
    seconds = now.at - before.at if before is not None else stats.uptime_seconds
    title = Text(f"epoch {stats.epoch:x}  up {duration(stats.uptime_seconds)}  workers {stats.sessions}", style="bold")
    parts: list[RenderableType] = [title, *_warnings(stats), _reuse(stats, past if before is not None else None)]
    parts += [_memory(stats), _rates(stats, past, max(seconds, 1e-3))]
    if stats.session_details:
        parts.append(_sessions(stats))
    if stats.calls:
        parts.append(_calls(stats))
    return Group(*parts)


def _warnings(stats: pb.StatsResponse) -> Iterator[Text]:
    if stats.durable_failing:
        yield Text(f"the durable tier cannot be written to: {stats.durable_failing}", style="red")
    if stats.remote_failing:
        yield Text(f"the remote tier is not used: {stats.remote_failing}", style="red")
    if stats.corrupt_chunks:
        yield Text(f"{stats.corrupt_chunks} chunks were corrupt since the start; run `cache verify`", style="red")
    if stats.failed_reads:
        yield Text(f"{stats.failed_reads} reads of the disk failed since the start; see the kernel's log", style="red")
    if stats.loop_stall_ms > 100:
        yield Text(f"the event loop stood still for {stats.loop_stall_ms:.0f} ms in the last minute", style="yellow")


def _reuse(stats: pb.StatsResponse, past: pb.StatsResponse | None) -> Table:
    table = Table("tokens read before", "now" if past is not None else "", "since the start", expand=False)
    ever = HitRatios.of(stats)
    recent = HitRatios.of(stats, past) if past is not None else HitRatios()
    for name in ("total", "pool", "arena", "disk", *(["remote"] if stats.remote_engine else [])):
        share = getattr(ever, name)
        bar = ProgressBar(total=1.0, completed=share or 0.0, width=30)
        cell = Table.grid(padding=(0, 1))
        cell.add_row(bar, percent(share))
        table.add_row(name, percent(getattr(recent, name)) if past is not None else "", cell)
    return table


def _memory(stats: pb.StatsResponse) -> Table:
    table = Table("tier", "used", "of", "chunks", "", expand=False)
    gpu = ("GPU", stats.gpu_arena_used_bytes, stats.gpu_arena_bytes, stats.gpu_chunks)
    rows = (
        ("arena", stats.arena_used_bytes, stats.arena_bytes, stats.arena_chunks),
        *([gpu] if stats.gpu_arena_bytes else []),
        ("disk", stats.durable_bytes, stats.durable_budget_bytes, stats.durable_chunks),
    )
    for name, used, size, count in rows:
        bar = ProgressBar(total=max(size, 1), completed=min(used, size), width=20)
        table.add_row(name, format_size(used), format_size(size), f"{count:,}", bar)
    return table


def _rates(stats: pb.StatsResponse, past: pb.StatsResponse, seconds: float) -> Table:
    table = Table.grid(padding=(0, 2))

    def rate(name: str) -> str:
        return f"{(getattr(stats, name) - getattr(past, name)) / seconds:,.1f}/s"

    table.add_row("prompts", rate("prompts"), "matches", rate("matches"), "commits", rate("commits"))
    table.add_row(
        "arena evictions", rate("arena_evictions"), "disk evictions", rate("durable_evictions"),
        "tokens from disk", rate("promoted_tokens"),
    )  # fmt: skip
    if stats.remote_engine:
        table.add_row(
            "tokens from remote", rate("remote_tokens"), "asked there", rate("remote_lookups"),
            "not worth asking", rate("remote_bypassed"),
        )  # fmt: skip
        table.add_row(
            "read there", f"{format_size(stats.remote_bytes_per_second)}/s", "a look there",
            f"{stats.remote_latency_ms:.1f} ms", "waiting to be sent", f"{stats.remote_pending:,}",
        )  # fmt: skip
    table.add_row(
        "leases", f"{stats.leases:,}", "reservations", f"{stats.reservations:,}",
        "pending writes", f"{stats.pending_writes:,}",
    )  # fmt: skip
    return table


def _sessions(stats: pb.StatsResponse) -> Table:
    table = Table("worker", "namespace", "age", "leased chunks", "reservations", "staging", expand=False)
    found = sorted(stats.session_details, key=lambda s: (-s.leased_chunks, s.client_name))
    for s in found[:_MOST_SESSIONS]:
        table.add_row(
            escape(s.client_name), s.namespace.hex()[:12], duration(s.age_seconds), f"{s.leased_chunks:,}",
            f"{s.reservations:,}", format_size(s.staging_used_bytes),
        )  # fmt: skip
    if len(found) > _MOST_SESSIONS:
        table.caption = f"and {len(found) - _MOST_SESSIONS} more"
    return table


def _calls(stats: pb.StatsResponse) -> Table:
    table = Table("slowest calls", "last minute", "failed", "p50 ms", "p99 ms", "max ms", expand=False)
    for c in stats.calls[:_MOST_CALLS]:
        numbers = (f"{c.p50_ms:.2f}", f"{c.p99_ms:.2f}", f"{c.max_ms:.2f}")
        table.add_row(c.method, f"{c.count:,}", f"{c.errors:,}", *numbers)
    return table


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key press for a number of seconds. Without a terminal, it never gets a key."""
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
