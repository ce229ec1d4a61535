"""``kvsidecar status`` and ``kvsidecar stop``: the node whose sockets lie in a folder.

Who listens at a socket is asked of the kernel (SO_PEERCRED, unix(7)), so there is no file of process ids to be stale.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import grpc
import psutil
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import KVSidecarError, Unavailable
from kvsidecar.inference.v1 import inference_pb2
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvsidecar.runtime import default_runtime_dir, socket_target
from kvsidecar.sizes import format_size

RuntimeDir = Annotated[Path | None, typer.Option(help="Folder of the sockets; that of `serve` when left out.")]
_CREDENTIALS = struct.Struct("3i")
_PATIENCE_SECONDS = 3.0
_CACHE = "cache.sock"


@dataclass(frozen=True)
class Part:
    """One process of a node. ``pid`` is 0 for one in another container, -1 where nobody listens any more."""

    name: str
    pid: int
    serving: bool
    uptime_seconds: float
    detail: str


def status(
    runtime_dir: RuntimeDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what runs here and whether it serves; exit code 0 when all of it does, else 1."""
    folder = runtime_dir or default_runtime_dir()
    parts = parts_in(folder)
    if as_json:
        print(json.dumps([asdict(part) for part in parts]))
    elif not parts:
        print(f"nothing runs in {folder}; start it with: kvsidecar serve")
    else:
        table = Table("what", "", "pid", "up", "")
        for part in parts:
            state = "[green]serving[/green]" if part.serving else "[red]not serving[/red]"
            table.add_row(part.name, state, str(part.pid) if part.pid > 0 else "-", _ago(part), part.detail)
        Console().print(table)
    if not parts or not all(part.serving for part in parts):
        raise SystemExit(1)


def stop(
    runtime_dir: RuntimeDir = None,
    seconds: Annotated[float, typer.Option(help="How long the end may take; what is queued is written first.")] = 60.0,
) -> None:
    """End what runs here in order: no new requests, then running ones, then the cache. What is durable stays."""
    folder = runtime_dir or default_runtime_dir()
    for process in _to_end(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            named = " ".join(word for word in process.cmdline()[2:4] if not word.startswith("-"))
            what = f"{named} (process {process.pid})"
            process.terminate()
            if not _ended(process, seconds):
                raise Unavailable(f"{what} did not end within {seconds:g} s; wait, or kill it")
            print(f"stopped {what}")
    if left := [part.name for part in parts_in(folder) if part.pid >= 0]:
        raise Unavailable(f"{', '.join(left)} still runs in {folder}; stop it where it was started")
    print(f"nothing runs in {folder}")


def _ended(process: psutil.Process, seconds: float) -> bool:
    """Waits for a process's end. One whose parent has not asked how it ended has ended all the same."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


def parts_in(folder: Path) -> list[Part]:
    """The daemon, the workers by name, and the gateway if a supervisor is there."""
    sockets = sorted(folder.glob("*.sock"), key=lambda path: (path.name != _CACHE, path.name))
    found = [_part(path) for path in sockets]
    for supervisor in _supervisors(_listeners(folder)):
        for child in supervisor.children():
            if "gateway" in _arguments(child):
                found.append(Part("gateway", child.pid, True, time.time() - child.create_time(), ""))
    return found


def _part(path: Path) -> Part:
    pid = _listener(path)
    name = path.name.removesuffix(".sock")
    if pid is None:
        return Part(name, -1, False, 0.0, "its socket is left, and nobody listens there")
    uptime = 0.0
    with contextlib.suppress(psutil.Error):
        uptime = time.time() - psutil.Process(pid).create_time() if pid else 0.0
    with grpc.insecure_channel(socket_target(path)) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE_SECONDS)
            serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            detail = _of_cache(channel) if path.name == _CACHE else _of_worker(channel)
        except grpc.RpcError as error:
            serving, detail = False, error.details() or error.code().name
    return Part(name, pid, serving, uptime, detail)


def _of_cache(channel: grpc.Channel) -> str:
    stats = CacheServiceStub(channel).Stats(cache_pb2.StatsRequest(), timeout=_PATIENCE_SECONDS)
    held = f"{stats.tokens} tokens in {stats.chunks} chunks, {format_size(stats.arena_used_bytes)} of the arena"
    text = f"{stats.sessions} attached, {held}"
    return f"{text}; writing fails: {stats.durable_failing}" if stats.durable_failing else text


def _of_worker(channel: grpc.Channel) -> str:
    stub = InferenceServiceStub(channel)
    model = stub.GetModel(inference_pb2.GetModelRequest(), timeout=_PATIENCE_SECONDS)
    stats = stub.GetStats(inference_pb2.GetStatsRequest(), timeout=_PATIENCE_SECONDS)
    cache = "attached" if stats.cache_attached else "without cache"
    return f"{model.model_id} on {model.device}, {cache}; {stats.running} running, {stats.waiting} waiting"


def _to_end(folder: Path) -> list[psutil.Process]:
    """Supervisors, who end their children in order; then what runs without one, the daemon last."""
    listeners = _listeners(folder)
    supervisors = _supervisors(listeners)
    own = {child.pid for supervisor in supervisors for child in supervisor.children()}
    alone = [process for process in listeners if process.pid not in own]
    return [*supervisors, *sorted(alone, key=lambda process: "cache_daemon" in _arguments(process))]


def _listeners(folder: Path) -> list[psutil.Process]:
    """Who listens at the sockets; for the daemon's its guardian, whose command line is the same."""
    found = []
    for path in folder.glob("*.sock"):
        with contextlib.suppress(psutil.Error):
            if pid := _listener(path):
                process, parent = psutil.Process(pid), psutil.Process(pid).parent()
                guarded = parent is not None and _arguments(parent) == _arguments(process)
                found.append(parent if parent is not None and guarded else process)
    return found


def _supervisors(listeners: list[psutil.Process]) -> list[psutil.Process]:
    found = {}
    for process in listeners:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and {"inference_svc", "serve"} <= set(_arguments(parent)):
                found[parent.pid] = parent
    return list(found.values())


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _listener(path: Path) -> int | None:
    """The process that listens at a Unix socket; None when there is none. Raises KVSidecarError when it is not ours."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PATIENCE_SECONDS)
        try:
            probe.connect(str(path))
        except PermissionError:
            raise KVSidecarError(f"{path} is another user's; ask as that one, or as root") from None
        except OSError:
            return None
        return int(_CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0])


def _ago(part: Part) -> str:
    minutes, seconds = divmod(int(part.uptime_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
