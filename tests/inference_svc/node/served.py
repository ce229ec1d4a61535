"""A running ``kvsidecar serve``, for tests of the node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil
from kvsidecar.net.addresses import TcpAddress

from benchmarks.node import free_port
from tests import busy_machine

CLI = str(Path(sys.executable).parent / "kvsidecar")


class Served:
    """A running ``kvsidecar serve`` with its own folders."""

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        model: str = "demo",
        settings: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        wait: bool = True,
    ) -> None:
        folder.chmod(0o700)
        self.folder, self.port = folder, free_port()
        self.url = f"http://{TcpAddress(host, self.port)}"
        own = {name: value for name, value in os.environ.items() if not name.startswith("KVSIDECAR_")}
        self.environment = {**own, "XDG_RUNTIME_DIR": str(folder), "XDG_DATA_HOME": str(folder / "data")}
        self.environment |= {**busy_machine.ENVIRONMENT, **(settings or {})}
        (folder / "kvsidecar").mkdir(mode=0o700)
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [CLI, "serve", model, "--workers", str(workers), "--port", str(self.port), "--host", host,
             "--arena-bytes", "64MiB"],
            env=self.environment, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        if not wait:
            return
        try:
            self.until(lambda: self.health().get("workers_up") == workers, 150)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self.log.close()

    def health(self) -> dict[str, object]:
        try:
            return dict(httpx.get(f"{self.url}/health", timeout=5).json())
        except httpx.HTTPError:
            return {}

    def until(self, condition: object, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def text(self) -> str:
        self.log.flush()
        return (self.folder / "log").read_text()[-3000:]

    def children(self, word: str, parent: psutil.Process | None = None) -> list[psutil.Process]:
        """Return the children of the supervisor, or of another process, whose command has this word."""
        found = []
        for child in (parent or psutil.Process(self.process.pid)).children():
            with contextlib.suppress(psutil.Error):  # the process may end at this moment
                if word in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def replace_worker(self) -> None:
        """Kill the only worker; return when the restarted worker serves."""
        (worker,) = self.children("--name=worker-0")
        worker.kill()
        self.until(lambda: any(child.pid != worker.pid for child in self.children("--name=worker-0")))
        self.until(lambda: self.run("status").returncode == 0, 120)

    def ask(self) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hello " * 40}], "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)

    def run(self, *arguments: str, stdin: str | None = None, columns: int = 200) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, "COLUMNS": str(columns)}
        return subprocess.run(
            [CLI, *arguments], env=environment, capture_output=True, text=True, timeout=150, input=stdin, check=False
        )
