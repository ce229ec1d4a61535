"""``kvsidecar doctor``: checks installation, hardware and running services, with advice."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import grpc
from rich.table import Column, Table
from rich.text import Text

from kvsidecar.byte_sizes import format_size
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cli.cache.daemon_target import connected
from kvsidecar.cli.cache.hit_ratios import HitRatios
from kvsidecar.cli.cache.output_format import percent
from kvsidecar.cli.node_commands import gateway_of
from kvsidecar.cli.sharing_group import numerics_text, sharing_groups
from kvsidecar.cli.terminal import TerminalConsole
from kvsidecar.errors import KVSidecarError, PermissionDenied, from_rpc
from kvsidecar.extras import missing_packages
from kvsidecar.inference.v1 import inference_pb2
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvsidecar.integrations.vllm import vllm_install as vllm
from kvsidecar.net.channel import listens
from kvsidecar.process.cpus import usable_cpus
from kvsidecar.process.free_memory import free_bytes
from kvsidecar.process.interpreter import python_command
from kvsidecar.process.node_report import find_node
from kvsidecar.process.runtime_dir import default_runtime_dir, own_runtime_dir, socket_target

_PACKAGES = ("grpcio", "protobuf", "lmdb", "uvloop", "numpy")
_WORKER_PACKAGES = ("torch", "transformers")
_LEAST_MEMORY, _LONGEST_STALL_MS = 2 << 30, 250.0
_MKL_SETTING = "MKL_CBWR"
_OK, _NOTE, _BAD = "[green]ok[/green]", "[yellow]note[/yellow]", "[red]problem[/red]"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``advice`` is empty if the user need not act."""

    what: str
    state: str
    detail: str
    advice: str = ""


def doctor() -> None:
    """Check installation, hardware and running services, and give advice."""
    missing = missing_packages("worker")
    worker = [worker_missing(missing)] if missing else _packages(_WORKER_PACKAGES)
    kernels = [] if "torch" in missing else _kernels()  # connectors need them, even without a worker
    bits = [] if missing else _bits()
    findings = [*_machine(), *_packages(_PACKAGES), *worker, *kernels, *bits, *_services(), *engine_findings()]
    # Show URLs and paths in full, even on a narrow terminal.
    table = Table("what", "", Column("detail", overflow="fold"), Column("what to do", overflow="fold"))
    for f in findings:
        table.add_row(Text(f.what), f.state, Text(f.detail), Text(f.advice))
    TerminalConsole().print(table)
    if vllm.installed() is not None:
        # Outside of the table, which would wrap it: users copy this line.
        print(f"vLLM on this daemon: vllm serve MODEL {vllm.connector_flag()}")
    if any(f.state == _BAD for f in findings):
        raise SystemExit(1)


def _machine() -> list[Finding]:
    free = free_bytes()
    enough = free > _LEAST_MEMORY
    return [
        Finding("machine", _OK, f"{platform.machine()}, {_cores()}, Python {platform.python_version()}"),
        Finding(
            "memory",
            _OK if enough else _NOTE,
            f"{format_size(free)} free for this process and its children",
            "" if enough else "the arena and the pools take it as they fill: use a smaller --arena-bytes, --pool-bytes",
        ),
    ]


def worker_missing(packages: list[str]) -> Finding:
    """Return the line for an installation without the worker: a choice, not a problem."""
    detail = f"not installed ({', '.join(packages)}); the client, the daemon and an engine's connector run without it"
    return Finding("worker", _NOTE, detail, "to serve models: pip install 'kvsidecar[worker]'")


def _packages(names: tuple[str, ...]) -> list[Finding]:
    import importlib.metadata  # lazy: other commands start faster without it

    out = []
    for name in names:
        try:
            out.append(Finding(name, _OK, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            out.append(Finding(name, _BAD, "not installed", f"pip install {name}"))
    return out


def _kernels() -> list[Finding]:
    try:
        devices: Any = importlib.import_module("kvkernels.device.visible_devices")
        kernels: Any = importlib.import_module("kvkernels")
        cpu: Any = importlib.import_module("kvkernels.cpu.cpu_library").loaded_library()
        native = importlib.import_module("kvkernels.cpu.cpu_features").native_bfloat16()
    except ImportError as error:
        return [Finding("kernels", _BAD, str(error), "install KVSidecar again: pip install . in its folder")]
    out = []
    if cards := devices.cuda_devices():
        names = [devices.device_of(card).facts.name for card in cards]
        out.append(Finding("device", _OK, f"cuda: {', '.join(names)}"))
    else:
        out.append(
            Finding(
                "device",
                _OK if native else _NOTE,
                f"cpu, {'native bfloat16' if native else 'no native bfloat16'}; torch sees no CUDA device",
                "" if native else "models of 16 bits run as float32 here; --weights 8 needs a quarter of the memory",
            )
        )
    if cpu.library is None:
        out.append(Finding("CPU kernels", _NOTE, f"torch serves, some times slower: {cpu.why}", cpu.advice))
    out.extend(Finding(f"{i.op} on {i.device}", _OK, i.name) for i in kernels.implementations())
    return out


def _bits() -> list[Finding]:
    """Check whether a row of a product has the same bits in every batch.

    If it has, a hit with 16-bit storage changes no answer. The check runs in subprocesses, because MKL reads its
    setting once per process.
    """
    bare = {name: value for name, value in os.environ.items() if name != _MKL_SETTING}
    probe = python_command("-m", "inference_svc.models.batch_invariance_probe")
    tries = [
        subprocess.Popen([*probe, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for flags, environment in (([], dict(os.environ)), (["--as-is"], bare))
    ]
    said = [(process.communicate(), process.returncode) for process in tries]
    for (_, complaint), code in said:
        if code:
            reason = (complaint.strip().splitlines() or [f"it ended with {code}"])[-1]
            return [Finding("same bits in every batch", _NOTE, f"could not be tried: {reason}")]
    served, unset = (json.loads(out) for (out, _), _ in said)
    return [bits_finding(served, unset, os.environ.get(_MKL_SETTING, ""), _cpu())]


def bits_finding(served: dict[str, Any], unset: dict[str, Any], chosen: str, cpu: str) -> Finding:
    """Interpret two probes, with a worker's MKL setting and without.

    ``chosen`` is the environment's setting.
    """
    what = "same bits in every batch"
    setting = chosen or served["setting"]
    with_setting = f" with {_MKL_SETTING}={setting}" if setting else ""
    bad = _shapes(served)
    if bad:
        advice = (
            f"unset {_MKL_SETTING}" if chosen else "compare answers with and without the cache before you rely on it"
        )
        text = f"no, on {cpu}{with_setting}: {bad}; answers with the cache may differ in last bits from those without"
        return Finding(what, _NOTE, text, advice)
    text = f"yes, on {cpu}{with_setting}, in float32 and bfloat16: exact hits change no answer at --storage-bits 16"
    without = _shapes(unset)
    if without:
        text += f"; without it not, {without}; workers set it"
    return Finding(what, _OK, text)


def _shapes(probe: dict[str, Any]) -> str:
    return "; ".join(f"{dtype} products {', '.join(shapes)}" for dtype, shapes in probe["uneven"].items() if shapes)


def _cores() -> str:
    usable, all_of_them = usable_cpus(), os.cpu_count() or 1
    return f"{all_of_them} cores" if usable >= all_of_them else f"{usable} of {all_of_them} cores"


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def cache_findings() -> list[Finding]:
    """Check the cache daemon and its store."""
    socket = os.environ.get("KVSIDECAR_CACHE_SOCKET") or str(default_runtime_dir() / "cache.sock")
    try:
        with connected(socket) as stub:
            stats = stub.Stats(cache_pb2.StatsRequest(), timeout=1)
    except PermissionDenied as error:
        return [Finding("cache daemon", _OK, f"runs; {error}")]
    except KVSidecarError as error:
        if listens(socket):
            return [Finding("cache daemon", _BAD, str(error), "see the daemon's log")]
        return [Finding("cache daemon", _NOTE, f"not running on {socket}", "kvsidecar serve")]
    hits = HitRatios.of(stats)
    text = f"{stats.chunks} chunks, {stats.sessions} workers attached"
    out = [Finding("cache daemon", _OK, text if hits.total is None else f"{text}, hit ratio {percent(hits.total)}")]
    out.extend(sharing_findings(stats))
    if stats.durable_failing:
        out.append(Finding("durable tier", _BAD, stats.durable_failing, "free disk space; see docs/operations.md"))
    elif stats.durable_budget_bytes:
        used = f"{format_size(stats.durable_bytes)} of {format_size(stats.durable_budget_bytes)}"
        out.append(Finding("durable tier", _OK, f"{used} used, {stats.pending_writes} chunks waiting"))
    else:
        out.append(Finding("durable tier", _NOTE, "none: what is stored goes with the daemon", "set --store"))
    if stats.remote_failing:
        advice = "see that it runs and can be reached; docs/operations.md says more"
        out.append(Finding("remote tier", _BAD, f"{stats.remote_engine}: {stats.remote_failing}", advice))
    elif stats.remote_engine:
        text = (
            f"{stats.remote_engine} answers in {stats.remote_latency_ms:.1f} ms, {stats.remote_pending} chunks waiting"
        )
        out.append(Finding("remote tier", _OK, text))
    if stats.corrupt_chunks:
        advice = "stop the daemon and run: kvsidecar cache verify --repair; look at the disk"
        out.append(Finding("store", _BAD, f"{stats.corrupt_chunks} chunks were corrupt since the start", advice))
    if stats.loop_stall_ms > _LONGEST_STALL_MS:
        text = f"stood still for {stats.loop_stall_ms:.0f} ms in the last minute"
        out.append(Finding("cache daemon's loop", _NOTE, text, "give the daemon a core of its own"))
    return out


def sharing_findings(stats: cache_pb2.StatsResponse) -> list[Finding]:
    """Report which workers share chunks, and which do not because their numerics differ."""
    groups = sharing_groups(stats.session_details)
    out = [Finding("shared cache", _OK, group.text) for group in groups]
    for one, other in combinations(groups, 2):
        if one.differs_in_numerics_alone(other):
            text = f"{', '.join(one.clients)} and {', '.join(other.clients)} share nothing: they compute other bits"
            advice = (
                "give them the same kernels and PyTorch, or, where hits matter more than equal bits, start both with "
                "--share-across-machines"
            )
            out.append(Finding("shared cache", _NOTE, text, advice))
    return out


def engine_findings() -> list[Finding]:
    """Report other installed engines that can use the daemon."""
    found = vllm.installed()
    if found is None:
        return [Finding("vLLM", _OK, "not installed here")]
    name, version = found
    if not vllm.is_supported(version):
        least = ".".join(map(str, vllm.MIN_VERSION))
        return [
            Finding("vLLM", _NOTE, f"{name} {version}: too old for the connector", f"pip install '{name}>={least}'")
        ]
    return [Finding("vLLM", _OK, f"{name} {version}; its layout is checked whenever it starts")]


def _services() -> list[Finding]:
    folder = own_runtime_dir()
    out = cache_findings()
    for socket in sorted(folder.glob("worker-*.sock")) or [folder / "worker-0.sock"]:
        with grpc.insecure_channel(socket_target(socket)) as channel:
            worker: Any = InferenceServiceStub(channel)
            try:
                m = worker.GetModel(inference_pb2.GetModelRequest(), timeout=1)
                text = f"{m.model_id} on {m.device} in {m.dtype}, {m.context_length} tokens of context"
                told = numerics_text(m.numerics)
                state = _NOTE if m.numerics.shared_across_machines else _OK
                out.append(Finding(socket.stem, state, f"{text}; {told}" if told else text))
                if m.reuse_anywhere.sentence:
                    out.append(Finding("reuse anywhere", _OK, m.reuse_anywhere.sentence))
            except grpc.RpcError as error:
                if listens(socket):
                    out.append(Finding(socket.stem, _BAD, str(from_rpc(error)), "see the worker's log"))
                else:
                    out.append(Finding(socket.stem, _NOTE, f"not running on {socket}", "kvsidecar serve"))
    if node := find_node(folder):
        gateway = gateway_of(node)
        advice = "" if gateway.serving else "wait for a worker's model; kvsidecar status"
        text = gateway.detail if gateway.serving else f"{gateway.state}: {gateway.detail}"
        out.append(Finding("gateway", _OK if gateway.serving else _NOTE, text, advice))
    return out
