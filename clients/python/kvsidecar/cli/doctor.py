"""``kvsidecar doctor``: what is installed, what would be used, what is reachable, and what to do about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.inference.v1 import inference_pb2
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvsidecar.runtime import default_runtime_dir, socket_target
from kvsidecar.sizes import format_size

_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "lmdb", "numba", "uvloop", "numpy")
_OK, _NOTE, _BAD = "[green]ok[/green]", "[yellow]note[/yellow]", "[red]problem[/red]"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``advice`` says what to do, when there is something."""

    what: str
    state: str
    detail: str
    advice: str = ""


def doctor() -> None:
    """Say what is installed, what would be used, what is reachable, and what to do."""
    findings = [*_machine(), *_packages(), *_kernels(), *_services()]
    table = Table("what", "", "detail", "what to do")
    for f in findings:
        table.add_row(f.what, f.state, f.detail, f.advice)
    Console().print(table)
    if any(f.state == _BAD for f in findings):
        raise SystemExit(1)


def _machine() -> list[Finding]:
    out = [Finding("machine", _OK, f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")]
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        enough = free > 1 << 30
        out.append(
            Finding(
                "shared memory",
                _OK if enough else _BAD,
                f"{format_size(free)} free in /dev/shm",
                "" if enough else "give the container more shared memory, or use a smaller --arena-bytes",
            )
        )
    else:
        out.append(Finding("shared memory", _BAD, "/dev/shm is missing", "mount a tmpfs and set --arena-dir"))
    return out


def _packages() -> list[Finding]:
    out = []
    for name in _PACKAGES:
        try:
            out.append(Finding(name, _OK, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            needed = name != "numba"
            out.append(
                Finding(name, _BAD if needed else _NOTE, "not installed", f"pip install {name}" if needed else "")
            )
    return out


def _kernels() -> list[Finding]:
    try:
        torch: Any = importlib.import_module("torch")
        kernels: Any = importlib.import_module("kvkernels")
    except ImportError as error:
        return [Finding("kernels", _BAD, str(error), "pip install kvsidecar")]
    out = []
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        out.append(Finding("device", _OK, f"cuda: {', '.join(names)}"))
    else:
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        out.append(
            Finding(
                "device",
                _OK if native else _NOTE,
                f"cpu, {'native bfloat16' if native else 'no native bfloat16'}; torch sees no CUDA device",
                "" if native else "models run as float32 here, at half the speed",
            )
        )
    out.extend(Finding(f"{i.op} on {i.device}", _OK, i.name) for i in kernels.implementations())
    return out


def _services() -> list[Finding]:
    folder = default_runtime_dir()
    out = []
    with grpc.insecure_channel(socket_target(folder / "cache.sock")) as channel:
        stub: Any = CacheServiceStub(channel)
        try:
            s = stub.Stats(cache_pb2.StatsRequest(), timeout=1)
            text = f"{s.chunks} chunks, {s.sessions} workers attached"
            out.append(Finding("cache daemon", _OK, text))
        except grpc.RpcError:
            out.append(Finding("cache daemon", _NOTE, f"not running on {folder}/cache.sock", "kvsidecar serve"))
    for socket in sorted(folder.glob("worker-*.sock")) or [folder / "worker-0.sock"]:
        with grpc.insecure_channel(socket_target(socket)) as channel:
            worker: Any = InferenceServiceStub(channel)
            try:
                m = worker.GetModel(inference_pb2.GetModelRequest(), timeout=1)
                text = f"{m.model_id} on {m.device} in {m.dtype}, {m.context_length} tokens of context"
                out.append(Finding(socket.stem, _OK, text))
            except grpc.RpcError:
                out.append(Finding(socket.stem, _NOTE, f"not running on {socket}", "kvsidecar serve"))
    return out
