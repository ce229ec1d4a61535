"""``kvsidecar serve``: daemon, workers and gateway under one supervisor.

A child that dies is started again, with growing pauses while it keeps dying. A child that refuses its settings
ends the whole. SIGTERM ends the children front to back: no new requests, then running ones, then the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc
import httpx
import structlog
import uvloop
from kvsidecar.cli.settings import add_flags, configure_logging, read_settings
from kvsidecar.errors import ConfigurationError
from kvsidecar.runtime import default_data_dir, default_runtime_dir, ensure_private_dir, socket_target
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

log = structlog.get_logger("serve")

_FIRST_PAUSE, _LAST_PAUSE, _STABLE_SECONDS = 0.1, 10.0, 30.0
_STOP_SECONDS = 15.0
_BAD_SETTINGS = 2


class ServeConfig(BaseSettings):
    """A whole node: one cache daemon, some workers, one gateway. Each process has more settings of its own; give
    them by its environment variables (see: kvsidecar daemon --help, worker --help, gateway --help)."""

    model_config = SettingsConfigDict(env_prefix="KVSIDECAR_", extra="ignore", frozen=True, protected_namespaces=())

    model: str = "demo"
    """demo (built in), shape:NAME (random weights, for measuring), a folder, or a hub id."""
    workers: int = Field(default=1, ge=1, le=64)
    """How many inference workers."""
    host: str = "127.0.0.1"
    """Address of the HTTP gateway."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the HTTP gateway."""
    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    """Private folder for the sockets."""
    store: str = Field(default_factory=lambda: str(default_data_dir() / "store"))
    """Folder of the durable store; none keeps nothing on disk."""
    arena_bytes: str = "1GiB"
    """Size of the arena in shared memory."""
    store_bytes: str = "8GiB"
    """Budget of the durable store."""
    storage_bits: Literal["16", "8", "4"] = "8"
    """Bits per stored element."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto (the checkpoint's), float32, bfloat16 or, on CUDA, float16."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message to log."""


@dataclass(eq=False)
class Child:
    """One process and how it is started."""

    name: str
    command: list[str]
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    started: float = 0.0
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    """Starts, watches and ends the children."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._failed: str | None = None
        self._children: list[Child] = []
        self.cache_socket = config.runtime_dir / "cache.sock"
        self.worker_sockets = [config.runtime_dir / f"worker-{i}.sock" for i in range(config.workers)]

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        ensure_private_dir(self._config.runtime_dir)
        started = asyncio.create_task(self._start_all())
        await asyncio.wait({started, asyncio.create_task(self._stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if started.done() and not self._stop.is_set():
            started.result()
            await self._stop.wait()
        started.cancel()
        await self._end_all()
        if self._failed:
            print(f"kvsidecar serve: {self._failed}", file=sys.stderr)
            return 1
        return 0

    # ---- starting -------------------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        self._launch(Child("daemon", self._daemon_command()))
        await self._ready(self.cache_socket)
        for i, socket in enumerate(self.worker_sockets):
            self._launch(Child(f"worker-{i}", self._worker_command(i, socket)))
        self._launch(Child("gateway", self._gateway_command()))
        for socket in self.worker_sockets:
            await self._ready(socket)
        url = f"http://{self._config.host}:{self._config.port}"
        async with httpx.AsyncClient() as client:
            while not self._stop.is_set():
                try:
                    if (await client.get(f"{url}/health", timeout=2)).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        log.info("ready", url=f"{url}/v1", model=self._config.model, workers=self._config.workers)

    async def _ready(self, socket: Path) -> None:
        """Waits until a server answers on a socket."""
        while not self._stop.is_set():
            if socket.exists():
                async with grpc.aio.insecure_channel(socket_target(socket)) as channel:
                    try:
                        await asyncio.wait_for(channel.channel_ready(), 1.0)
                        return
                    except TimeoutError:
                        continue
            await asyncio.sleep(0.05)

    def _daemon_command(self) -> list[str]:
        c = self._config
        return [
            sys.executable, "-m", "cache_daemon", "--socket", str(self.cache_socket), "--store", c.store,
            "--arena-bytes", c.arena_bytes, "--store-bytes", c.store_bytes, "--log-level", c.log_level,
        ]  # fmt: skip

    def _worker_command(self, i: int, socket: Path) -> list[str]:
        c = self._config
        threads = max(1, (os.cpu_count() or 1) // c.workers)
        return [
            sys.executable, "-m", "inference_svc", "worker", "--model", c.model, "--socket", str(socket),
            "--name", f"worker-{i}", "--cache-socket", str(self.cache_socket), "--storage-bits", c.storage_bits,
            "--device", c.device, "--dtype", c.dtype, "--threads", str(threads), "--log-level", c.log_level,
        ]  # fmt: skip

    def _gateway_command(self) -> list[str]:
        c = self._config
        return [
            sys.executable, "-m", "inference_svc", "gateway", "--host", c.host, "--port", str(c.port),
            "--workers", ",".join(map(str, self.worker_sockets)), "--log-level", c.log_level,
        ]  # fmt: skip

    def _launch(self, child: Child) -> None:
        self._children.append(child)
        child.watcher = asyncio.create_task(self._watch(child))

    # ---- watching -------------------------------------------------------------------------------------------

    async def _watch(self, child: Child) -> None:
        """Runs a child, again and again, until the supervisor stops."""
        pause = _FIRST_PAUSE
        while not self._stop.is_set():
            child.started = time.monotonic()
            # A session of its own: Ctrl-C reaches the supervisor alone, which ends the children in order.
            child.process = await asyncio.create_subprocess_exec(*child.command, start_new_session=True)
            code = await child.process.wait()
            if self._stop.is_set():
                return
            if code == _BAD_SETTINGS or (code == 1 and child.restarts == 0 and child.name != "gateway"):
                self._failed = f"{child.name} could not start; its message is above"
                self._stop.set()
                return
            if time.monotonic() - child.started > _STABLE_SECONDS:
                pause = _FIRST_PAUSE
            log.warning("process died, starting it again", name=child.name, code=code, pause_seconds=pause)
            child.restarts += 1
            await asyncio.sleep(pause)
            pause = min(_LAST_PAUSE, pause * 2)

    async def _end_all(self) -> None:
        for child in reversed(self._children):
            process = child.process
            if process is not None and process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), _STOP_SECONDS)
                except TimeoutError:
                    log.warning("process did not stop in time, killing it", name=child.name)
                    process.kill()
                    await process.wait()
            if child.watcher is not None:
                child.watcher.cancel()


def main(arguments: Sequence[str]) -> int:
    """``kvsidecar serve``. Returns the exit code: 0 stopped, 1 a child failed to start, 2 bad settings."""
    parser = argparse.ArgumentParser(prog="kvsidecar serve", description=ServeConfig.__doc__)
    add_flags(parser, ServeConfig)
    given = vars(parser.parse_args(arguments))
    file = given.pop("config")
    try:
        config = read_settings(ServeConfig, given, file)
        configure_logging(config.log_level)

        async def run() -> int:
            return await Supervisor(config).run()

        code: int = uvloop.run(run())
        return code
    except ConfigurationError as error:
        print(f"kvsidecar serve: {error}", file=sys.stderr)
        return 2
