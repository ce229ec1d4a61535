"""Supervisor (``kvsidecar serve``): runs the daemon, workers and gateway of a node.

A child that exits is restarted, with exponential backoff. If a child fails before it has ever served, or refuses its
settings, the node ends. On SIGTERM the supervisor ends the children in this order: gateway, workers, daemon.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar

import structlog
import uvloop
from kvsidecar.cli.exec_service import of_another
from kvsidecar.cli.flags import FlagParser, add_flags, format_flags
from kvsidecar.cli.service_settings import configure_logging, read_settings
from kvsidecar.errors import ConfigurationError, KVSidecarError
from kvsidecar.net.addresses import TcpAddress, parse_tcp, why_not_bindable
from kvsidecar.net.http_health import health_status
from kvsidecar.process.cpus import usable_cpus
from kvsidecar.process.fd_limit import raise_descriptor_limit
from kvsidecar.process.free_memory import free_bytes
from kvsidecar.process.interpreter import python_command
from kvsidecar.process.node_report import NodeReport, write_reports
from kvsidecar.process.runtime_dir import default_data_dir, default_runtime_dir, ensure_private_dir, listener_pid
from kvsidecar.process.sigint import EXIT_CODE
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from inference_svc.models.model_check import cuda_devices
from inference_svc.node.daemon_settings import read_daemon_settings, remote_daemon_settings
from inference_svc.node.gateway_settings import read_gateway_settings
from inference_svc.node.liveness_probe import PROBE_SECONDS, GrpcProbe, HttpProbe, Probe
from inference_svc.node.node_lock import NodeLock
from inference_svc.node.planned_memory import warn_of_planned_memory
from inference_svc.node.restarting_process import STOP_SECONDS, RestartingProcess
from inference_svc.server.daemon_address import daemon_address
from inference_svc.server.preflight import checked_settings
from inference_svc.server.worker_config import ModelSettings, WorkerConfig

log = structlog.get_logger("serve")

CACHE_SOCKET = "cache.sock"
_OF_GATEWAY = "host port log_level page otlp_endpoint default_max_tokens alias claude_names drain_seconds".split()
_LOOK_SECONDS, _FOLDER_SECONDS = 0.1, 1.0


class ServeConfig(ModelSettings):
    """A whole node: one cache daemon, some workers, one gateway. With cache_address it uses a daemon on another host
    instead of its own. Each process has further settings; set them by its environment variables (see: kvsidecar daemon
    --help, worker --help, gateway --help)."""

    model_config = SettingsConfigDict(env_prefix="KVSIDECAR_", extra="forbid", frozen=True, protected_namespaces=())

    flags_title: ClassVar[str] = "the node"

    workers: int = Field(default=1, ge=1, le=64)
    """Number of inference workers."""
    devices: str = ""
    """Numbers of the GPUs that the workers use in turn, separated by commas, such as 0,1. Each worker sees only its own
    tensor_parallel_size GPUs. By default, there are as many workers as the GPUs suffice for."""
    host: str = "127.0.0.1"
    """Address of the HTTP gateway."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the HTTP gateway."""
    page: bool = True
    """Serve a web page at / of the gateway: chat, reused parts of prompts, state of the node."""
    default_max_tokens: int = Field(default=0, ge=0, lt=2**31)
    """Maximum tokens of a chat completion or response whose request sets no limit; 0 for the rest of the context."""
    alias: str = ""
    """Further names of the model or its adapters: NAME=MODEL, separated by commas."""
    claude_names: bool = False
    """Answer requests for any model whose name begins with claude-, for Anthropic's clients."""
    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    """Private folder for the sockets."""
    store: str = Field(default_factory=lambda: str(default_data_dir() / "store"))
    """Folder of the durable store; none for a cache in memory only."""
    arena_bytes: str = "1GiB"
    """Size of the arena in shared memory."""
    store_bytes: str = "8GiB"
    """Budget of the durable store."""
    liveness_seconds: float = Field(default=60.0, ge=0)
    """A process that has served and does not answer for this long is killed and restarted; 0: never."""


class Supervisor:
    """Starts, watches and ends the child processes of a node."""

    def __init__(self, config: ServeConfig, worker: WorkerConfig, lock: NodeLock | None = None) -> None:
        self._config, self._worker, self._lock = config, worker, lock
        self._url = gateway_url(config)
        self._stop = asyncio.Event()
        self._failed: str | None = None
        self._children: list[RestartingProcess] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._gateway = read_gateway_settings(self._explicit(*_OF_GATEWAY))
        self.cache_socket = config.runtime_dir / CACHE_SOCKET
        self.daemon_settings = (
            remote_daemon_settings() if worker.cache_address else read_daemon_settings(self._daemon_flags())
        )
        self.worker_sockets = [config.runtime_dir / f"worker-{i}.sock" for i in range(config.workers)]

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        started = asyncio.create_task(self._start_all())
        kept = asyncio.create_task(self._keep_folder())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({started, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                started.result()
                await stopped
        finally:
            for task in (started, stopped, kept):
                task.cancel()
            await self._end_all()
        if self._failed:
            print(f"kvsidecar serve: {self._failed}", file=sys.stderr)
            return 1
        return 0

    def _on_signal(self) -> None:
        """Stop the node. Passes a second signal on to the child that is draining."""
        if self._stop.is_set():
            for child in self._children:
                child.signal_again()
        self._stop.set()

    # ---- starting -------------------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        # Start all in parallel: the daemon serves long before a worker has imported torch.
        daemon = self._worker.cache_address or self._launch(
            "daemon", self._daemon_command(), GrpcProbe(self.cache_socket)
        )
        workers = [
            self._launch(f"worker-{i}", self._worker_command(i, socket), GrpcProbe(socket), worker_gpu(self._config, i))
            for i, socket in enumerate(self.worker_sockets)
        ]
        self._launch("gateway", self._gateway_command(), HttpProbe(self._url))
        awaited = workers if isinstance(daemon, str) else [daemon, *workers]
        await asyncio.gather(*(child.ready.wait() for child in awaited))
        while await asyncio.to_thread(health_status, self._url, PROBE_SECONDS) != HTTPStatus.OK:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
        name = self._worker.public_name
        shown, beside = _browser_urls(self._config)
        page = f"a page at {shown}, " if self._config.page else ""
        said = f"{name} is ready: {page}OpenAI's API at {shown}/v1{beside}; try: kvsidecar chat"
        on_terminal = sys.stdout.isatty()  # standard output may be a log instead, which has only JSON lines
        detail = {} if on_terminal else {"detail": said}
        log.info("ready", url=f"{self._url}/v1", model=name, workers=self._config.workers, **detail)
        if on_terminal:
            print(said, flush=True)

    def _daemon_command(self) -> list[str]:
        return python_command("-m", "cache_daemon", *format_flags(self._daemon_flags()))

    def _daemon_flags(self) -> dict[str, object]:
        own = self._explicit("store", "arena_bytes", "store_bytes", "log_level", "otlp_endpoint")
        return {"socket": self.cache_socket, **own}

    def _worker_command(self, i: int, socket: Path) -> list[str]:
        own = self._worker
        flags = self._explicit(*ModelSettings.model_fields) | {
            "model": own.model,
            "socket": socket,
            "name": f"worker-{i}",
        }
        if not own.cache_address:
            flags["cache_socket"] = self.cache_socket
        if self._config.devices:
            flags["device"] = "cuda"  # the worker sees no other GPU
        if "pool_bytes" not in own.model_fields_set and self._config.workers > max(1, len(_gpu_numbers(self._config))):
            flags["pool_bytes"] = own.planned_pool_bytes  # several workers on one GPU must not each take it all
        if "threads" not in own.model_fields_set:
            flags["threads"] = max(1, usable_cpus() // self._config.workers)
        if own.stream in ("auto", "partial_resident") and "memory_bytes" not in own.model_fields_set:
            flags["memory_bytes"] = self._worker_memory_bytes
        if "overflow_bytes" not in own.model_fields_set and self.daemon_settings.private_store:
            flags["overflow_bytes"] = 0
        if own.metrics_port:
            flags["metrics_port"] = own.metrics_port + i
        for name in ("tcp", "health_tcp", "vllm_grpc"):
            if address := getattr(own, name):
                first = parse_tcp(address)
                flags[name] = TcpAddress(first.host, first.port and first.port + i)
        return python_command("-m", "inference_svc", "worker", *format_flags(flags))

    @cached_property
    def _worker_memory_bytes(self) -> int:
        """Memory of a worker: its share of the free memory before the start, without the arena."""
        return max(1, (free_bytes() - self.daemon_settings.arena_bytes) // self._config.workers)

    def _gateway_command(self) -> list[str]:
        workers = ",".join(map(str, self.worker_sockets))
        cache = "none" if self._worker.cache_address else self.cache_socket
        flags = self._explicit(*_OF_GATEWAY)
        flags |= {"workers": workers, "cache_socket": cache, "supervisor_dir": self._config.runtime_dir}
        return python_command("-m", "inference_svc", "gateway", *format_flags(flags))

    def _explicit(self, *names: str) -> dict[str, object]:
        """Return the settings of ``names`` that were set; each process reads the others from its environment."""
        return _explicit(self._config, *names)

    # ---- watching -------------------------------------------------------------------------------------------

    def _launch(
        self, name: str, command: list[str], probe: Probe | None = None, environment: Mapping[str, str] | None = None
    ) -> RestartingProcess:
        drain_seconds = (self._gateway if name.startswith("gateway") else self._worker).drain_seconds
        child = RestartingProcess(
            name,
            command,
            probe,
            self._config.liveness_seconds,
            self._report,
            stop_seconds=STOP_SECONDS + drain_seconds,
            environment=environment or {},
        )
        self._children.append(child)
        self._watchers.append(asyncio.create_task(self._watch(child)))
        self._report()
        return child

    async def _watch(self, child: RestartingProcess) -> None:
        failed = await child.keep_running(self._stop)
        if failed:
            self._failed = failed
            self._stop.set()

    def _report(self) -> None:
        """Write the process reports for ``status`` and the gateway. A full disk is logged and ignored."""
        try:
            write_reports(self._config.runtime_dir, {child.name: child.report for child in self._children})
        except OSError as error:
            log.warning("the state of the node cannot be written", error=str(error))

    async def _keep_folder(self) -> None:
        """Recreate the runtime folder if it is deleted; the processes bind their sockets there again."""
        while self._lock is not None:
            await asyncio.sleep(_FOLDER_SECONDS)
            try:
                if self._lock.restore():
                    log.warning("the runtime folder was deleted, made it again", folder=str(self._config.runtime_dir))
                    self._report()
            except (KVSidecarError, OSError) as error:
                log.error("the runtime folder was deleted and cannot be made again", error=str(error))

    async def _end_all(self) -> None:
        for role in ("gateway", "worker", "daemon"):
            await asyncio.gather(*(child.terminate() for child in self._children if child.name.startswith(role)))
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)


def _explicit(config: ServeConfig, *names: str) -> dict[str, object]:
    return {name: getattr(config, name) for name in names if name in config.model_fields_set}


def _gpu_numbers(config: ServeConfig) -> list[int]:
    """Parse the setting ``devices``. Raises ConfigurationError."""
    if not config.devices:
        return []
    if not re.fullmatch(r"\d{1,3}(,\d{1,3})*", config.devices):
        raise ConfigurationError(f"devices is {config.devices!r}; allowed are numbers with commas between them: 0,1")
    if config.device not in ("auto", "cuda"):
        raise ConfigurationError(f"devices is {config.devices} and device is {config.device}; leave one out")
    numbers, found = [int(number) for number in config.devices.split(",")], cuda_devices()
    if max(numbers) >= found:
        allowed = f"allowed are 0 to {found - 1}" if found else "it has no CUDA device, or no driver for one"
        raise ConfigurationError(f"devices is {config.devices}, and this machine has {found}: {allowed}")
    if (ranks := config.tensor_parallel_size) > len(numbers):
        raise ConfigurationError(f"devices is {config.devices}, and tensor_parallel_size is {ranks}; name {ranks} GPUs")
    return numbers


def worker_gpu(config: ServeConfig, worker: int) -> dict[str, str]:
    """Return the environment in which a worker sees only its GPUs; empty if the setting assigns none."""
    numbers, ranks = _gpu_numbers(config), config.tensor_parallel_size
    if not numbers:
        return {}
    own = [numbers[(worker * ranks + rank) % len(numbers)] for rank in range(ranks)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[n] if visible else str(n) for n in own)}


def main(arguments: Sequence[str]) -> int:
    """Run ``kvsidecar serve``. Returns the exit code: 0 stopped, 1 a child failed to start, 2 bad settings."""
    parser = FlagParser(
        prog="kvsidecar serve",
        usage="%(prog)s [MODEL] [flags]",
        description=ServeConfig.__doc__,
        elsewhere=of_another,
    )
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="what to serve, as --model")
    add_flags(parser, ServeConfig)
    given = vars(parser.parse_args(arguments))
    file, model = given.pop("config"), given.pop("positional")
    if model is not None and "model" in given:
        parser.error(f"MODEL is {model} and --model is {given['model']}; give one of them")
    given |= {} if model is None else {"model": model}
    try:
        config = read_settings(ServeConfig, given, file)
        configure_logging(config.log_level, "serve")
        if (numbers := _gpu_numbers(config)) and "workers" not in config.model_fields_set:
            config = config.model_copy(update={"workers": len(numbers) // config.tensor_parallel_size})
        gateway = read_gateway_settings(_explicit(config, *_OF_GATEWAY))
        config = config.model_copy(update={"host": gateway.host, "port": gateway.port})
        raise_descriptor_limit()
        ensure_private_dir(config.runtime_dir)
        with NodeLock(config.runtime_dir) as lock:
            _refuse_taken_port(config)
            worker = _worker_settings(config)
            if not worker.cache_address:
                _refuse_second_daemon(config.runtime_dir / CACHE_SOCKET)
            lock.describe(NodeReport(os.getpid(), gateway_url(config), config.workers, cache=not worker.cache_address))
            worker = checked_settings(worker)
            node = Supervisor(config, worker, lock)
            warn_of_planned_memory(worker, config.workers, node.daemon_settings)

            async def run() -> int:
                return await node.run()

            code: int = uvloop.run(run())
        return code
    except KVSidecarError as error:
        print(f"kvsidecar serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # during the download of a model
        return EXIT_CODE


def _browser_urls(config: ServeConfig) -> tuple[str, str]:
    """Return a gateway's URL that a browser can open, and a remark about wildcard addresses."""
    scheme, host, port = gateway_url(config).partition(":")[0], config.host, config.port
    if host not in ("0.0.0.0", "::"):
        return f"{scheme}://{TcpAddress(host, port)}", ""
    elsewhere = f"from other machines {scheme}://{TcpAddress(os.uname().nodename, port)}/v1"
    return f"{scheme}://{TcpAddress('localhost', port)}", f" ({elsewhere}; it listens on {TcpAddress(host, port)})"


def _worker_settings(config: ServeConfig) -> WorkerConfig:
    """Read the settings of the workers: environment variables, overridden by settings of the node.

    Raises ConfigurationError before any process starts.
    """
    worker = read_settings(WorkerConfig, _explicit(config, *ModelSettings.model_fields), None)
    daemon_address(worker)
    if worker.cache_address:
        for name in ("store", "arena_bytes", "store_bytes"):
            if name in config.model_fields_set:
                raise ConfigurationError(
                    f"{name} is for a daemon of this node, and cache_address is {worker.cache_address}; leave one out"
                )
    return worker


def gateway_url(config: ServeConfig) -> str:
    """URL of the gateway on this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    place = TcpAddress(everywhere.get(config.host, config.host), config.port)
    return f"{'https' if os.environ.get('KVSIDECAR_GATEWAY_TLS_CERT') else 'http'}://{place}"


def _refuse_taken_port(config: ServeConfig) -> None:
    """Raise ConfigurationError if the gateway's port cannot be bound."""
    address = TcpAddress(config.host, config.port)
    if why := why_not_bindable(address):
        raise ConfigurationError(
            f"cannot listen on {address}: {why}; choose another --port, or stop what listens there"
        )


def _refuse_second_daemon(path: Path) -> None:
    """Raise ConfigurationError if a daemon that this node did not start listens at its socket."""
    if (pid := listener_pid(path, PROBE_SECONDS)) is not None:
        who = f"process {pid}" if pid else "a process of another container"
        raise ConfigurationError(
            f"a cache daemon ({who}) listens on {path}; stop it with kvsidecar stop, start only kvsidecar worker and "
            "kvsidecar gateway beside it, or give this node its own --runtime-dir and --store"
        )
