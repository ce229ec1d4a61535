"""``kvsidecar status`` and ``kvsidecar stop``: the node of a runtime folder.

The kernel names the process that listens at a socket (SO_PEERCRED, unix(7)). The supervisor's report
(``kvsidecar.process.node_report``) names processes that do not listen yet.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import grpc
import psutil
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.table import Column, Table
from rich.text import Text

from kvsidecar.byte_sizes import format_size
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.cli.exec_service import PROGRAMS
from kvsidecar.cli.sharing_group import numerics_text, sharing_groups
from kvsidecar.cli.terminal import TerminalConsole
from kvsidecar.errors import Unavailable
from kvsidecar.inference.v1 import inference_pb2
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvsidecar.net.http_health import health_status
from kvsidecar.process.node_report import STARTING, NodeReport, ProcessReport, find_node, read_reports
from kvsidecar.process.runtime_dir import default_runtime_dir, listener_pid, require_private_dir, socket_target

RuntimeDir = Annotated[Path | None, typer.Option(help="Folder of the sockets; that of `serve` when left out.")]
_PATIENCE_SECONDS = 3.0
_CACHE = "cache.sock"
SERVING, LOADING, NOT_READY, NOT_SERVING = "serving", "loading", "not ready", "not serving"
_COLORS = {SERVING: "green", LOADING: "yellow", NOT_READY: "yellow", NOT_SERVING: "red"}


@dataclass(frozen=True)
class Part:
    """One process of a node.

    ``pid`` is 0 for a process in another container, -1 if there is none. The gateway's detail is its URL.
    """

    name: str
    pid: int
    serving: bool
    uptime_seconds: float
    detail: str
    state: str
    """``serving``; ``loading``: started and not listening yet; ``not ready``: a gateway without a live worker; ``not
    serving``."""
    restarts: int = 0
    """Number of restarts by the supervisor."""
    kills: int = 0
    """Number of these restarts because the process did not respond."""
    oom_kills: int = 0
    """Number of these restarts after the kernel killed the process for lack of memory."""


def status(
    runtime_dir: RuntimeDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the node's processes and their health; exit code 0 when all serve, else 1.

    While a model is being loaded, its worker is `loading`, the gateway is `not ready`, and the exit code is 1.
    """
    folder = _trusted(runtime_dir)
    parts = parts_in(folder)
    if as_json:
        print(json.dumps([asdict(part) for part in parts]))
    elif not parts:
        print(f"nothing runs in {folder}; start it with: kvsidecar serve")
    else:
        table = Table("what", "", "pid", "up", Column(overflow="fold"))
        for part in parts:
            state = Text(part.state, style=_COLORS[part.state])
            table.add_row(Text(part.name), state, _pid(part), _ago(part), Text(_shown(part)))
        TerminalConsole().print(table)
    if not parts or not all(part.serving for part in parts):
        raise SystemExit(1)


def stop(
    runtime_dir: RuntimeDir = None,
    seconds: Annotated[float, typer.Option(help="How long the end may take; what is queued is written first.")] = 60.0,
) -> None:
    """Stop the node in order: new requests, running requests, then the cache daemon. Durable chunks stay."""
    folder = _trusted(runtime_dir)
    ending = _to_end(folder)
    for process in ending:
        with contextlib.suppress(psutil.NoSuchProcess):
            what = f"{_typed(process.cmdline())} (process {process.pid})"
            process.terminate()
            if not _ended(process, seconds):
                raise Unavailable(f"{what} did not end within {seconds:g} s; wait, or kill it")
            print(f"stopped {what}")
    if left := [part.name for part in parts_in(folder) if part.pid >= 0]:
        raise Unavailable(f"{', '.join(left)} still runs in {folder}; stop it where it was started")
    if not ending:
        print(f"nothing runs in {folder}")


def _trusted(runtime_dir: Path | None) -> Path:
    """Return the runtime folder.

    Raises ConfigurationError when another user could have created its content.
    """
    folder = runtime_dir or default_runtime_dir()
    require_private_dir(folder)
    return folder


def _typed(arguments: list[str]) -> str:
    """Return the command line as the user typed it."""
    module = arguments.index("-m") + 1 if "-m" in arguments else 0
    named = [word for word in arguments[module : module + 2] if not word.startswith("-")]
    ours = [name for name, program in PROGRAMS.items() if list(program) == named[: len(program)]]
    return f"kvsidecar {ours[0]}" if ours else " ".join(named)


def _ended(process: psutil.Process, seconds: float) -> bool:
    """Wait for a process to end; a zombie counts as ended."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


def parts_in(folder: Path) -> list[Part]:
    """Return the processes of a folder: the daemon and the workers, sorted by name.

    With a supervisor, the list includes the gateway and the processes that do not listen yet.
    """
    sockets = sorted(folder.glob("*.sock"), key=lambda path: (path.name != _CACHE, path.name))
    found = [_part(path) for path in sockets]
    node = find_node(folder)
    return found if node is None else _with_awaited(folder, {part.name: part for part in found}, node)


def _with_awaited(folder: Path, found: dict[str, Part], node: NodeReport) -> list[Part]:
    """Add the gateway, and the node's processes that do not listen, with their startup state."""
    children, reports = _children(node), read_reports(folder, node.pid)
    for name in ["cache", *(f"worker-{i}" for i in range(node.workers))]:
        if (name != "cache" or node.cache) and (name not in found or found[name].pid < 0):
            child = children.get(name)
            doing = "its model is being loaded" if name != "cache" else "its store is being opened"
            if child is not None and name not in found and _report_on(name, reports).state != STARTING:
                gone = f"it runs, but its socket {folder / name}.sock is gone; it should be back in a moment"
                found[name] = Part(name, child.pid, False, _age(child), gone, NOT_SERVING)
            elif child is None:
                found[name] = Part(name, -1, False, 0.0, "its process is about to be started", LOADING)
            else:
                found[name] = Part(name, child.pid, False, _age(child), doing, LOADING)
    gateway = gateway_of(node, children.get("gateway"))
    ordered = sorted(found.values(), key=lambda part: (part.name != "cache", len(part.name), part.name))
    return [_with_restarts(part, _report_on(part.name, reports)) for part in (*ordered, gateway)]


def _report_on(name: str, reports: dict[str, ProcessReport]) -> ProcessReport:
    """Return the supervisor's report on a process."""
    return reports.get("daemon" if name == "cache" else name, ProcessReport())


def _with_restarts(part: Part, report: ProcessReport) -> Part:
    return replace(
        part,
        restarts=report.deaths + report.kills + report.oom_kills,
        kills=report.kills,
        oom_kills=report.oom_kills,
    )


def _shown(part: Part) -> str:
    """Return a process's detail, with its restarts."""
    if not part.restarts:
        return part.detail
    again = f"{part.detail}; started again {part.restarts} time{'s' if part.restarts > 1 else ''}"
    again += f", {part.kills} of them because it did not answer" if part.kills else ""
    return again + (f", {part.oom_kills} of them killed for memory" if part.oom_kills else "")


def gateway_of(node: NodeReport, process: psutil.Process | None = None) -> Part:
    """Check a node's gateway: ready when it has a live worker."""
    ready = health_status(node.url, _PATIENCE_SECONDS) == HTTPStatus.OK
    state = SERVING if ready else NOT_READY
    return Part("gateway", process.pid if process else -1, ready, _age(process) if process else 0.0, node.url, state)


def _children(node: NodeReport) -> dict[str, psutil.Process]:
    """Return a supervisor's child processes by name."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(node.pid).children():
            given = _arguments(child)
            names = [word.removeprefix("--name=") for word in given if word.startswith("--name=")]
            if "cache_daemon" in given:
                found["cache"] = child
            elif "gateway" in given:
                found["gateway"] = child
            elif names:
                found[names[0]] = child
    return found


def _age(process: psutil.Process) -> float:
    """Return the seconds since a process's start."""
    with contextlib.suppress(psutil.Error):
        return float(time.time() - process.create_time())
    return 0.0


def _part(path: Path) -> Part:
    pid = listener_pid(path, _PATIENCE_SECONDS)
    name = path.name.removesuffix(".sock")
    if pid is None:
        return Part(name, -1, False, 0.0, "its socket is left over: no process listens there", NOT_SERVING)
    uptime = 0.0
    with contextlib.suppress(psutil.Error):
        uptime = _age(psutil.Process(pid)) if pid else 0.0
    with grpc.insecure_channel(socket_target(path)) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE_SECONDS)
            serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            detail = _of_cache(channel) if path.name == _CACHE else _of_worker(channel)
        except grpc.RpcError as error:
            serving, detail = False, error.details() or error.code().name
    return Part(name, pid, serving, uptime, detail, SERVING if serving else NOT_SERVING)


def _of_cache(channel: grpc.Channel) -> str:
    stats = CacheServiceStub(channel).Stats(cache_pb2.StatsRequest(), timeout=_PATIENCE_SECONDS)
    held = f"{stats.tokens} tokens in {stats.chunks} chunks, {format_size(stats.arena_used_bytes)} of the arena"
    text = "; ".join([f"{stats.sessions} attached, {held}", *(g.text for g in sharing_groups(stats.session_details))])
    if stats.durable_failing:
        return f"{text}; writing fails: {stats.durable_failing}"
    return f"{text}; {stats.failed_writes} writes to disk have failed" if stats.failed_writes else text


def _of_worker(channel: grpc.Channel) -> str:
    stub = InferenceServiceStub(channel)
    model = stub.GetModel(inference_pb2.GetModelRequest(), timeout=_PATIENCE_SECONDS)
    stats = stub.GetStats(inference_pb2.GetStatsRequest(), timeout=_PATIENCE_SECONDS)
    cache = "attached" if stats.cache_attached else "without cache"
    told = [f"{model.model_id} on {model.device}, {cache}", f"{stats.running} running, {stats.waiting} waiting"]
    return "; ".join(filter(None, [*told, numerics_text(model.numerics), model.reuse_anywhere.sentence]))


def _to_end(folder: Path) -> list[psutil.Process]:
    """Return the processes to stop, in order.

    Supervisors come first, because they stop their children in order. Then come the other processes, the daemon last.
    """
    listeners = _listeners(folder)
    supervisors = _supervisors(folder, listeners)
    own = {child.pid for supervisor in supervisors for child in supervisor.children()}
    alone = [process for process in listeners if process.pid not in own]
    return [*supervisors, *sorted(alone, key=lambda process: "cache_daemon" in _arguments(process))]


def _listeners(folder: Path) -> list[psutil.Process]:
    """Return the processes that listen at the sockets.

    For the daemon, return its parent with the same command line.
    """
    found = []
    for path in folder.glob("*.sock"):
        with contextlib.suppress(psutil.Error):
            if pid := listener_pid(path, _PATIENCE_SECONDS):
                process, parent = psutil.Process(pid), psutil.Process(pid).parent()
                guarded = parent is not None and _arguments(parent) == _arguments(process)
                found.append(parent if parent is not None and guarded else process)
    return found


def _supervisors(folder: Path, listeners: list[psutil.Process]) -> list[psutil.Process]:
    found = {}
    if node := find_node(folder):  # the node's processes may not listen yet
        with contextlib.suppress(psutil.Error):
            found[node.pid] = psutil.Process(node.pid)
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


def _pid(part: Part) -> str:
    return str(part.pid) if part.pid > 0 else "-"


def _ago(part: Part) -> str:
    minutes, seconds = divmod(int(part.uptime_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
