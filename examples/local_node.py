"""A node for an example: `kvsidecar serve` in its own folder, on a free port.

The other examples start their node with this class, so that each example is one command. Your own program needs only
the URL of a running node.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType

KVSIDECAR = Path(sys.executable).with_name("kvsidecar")


class LocalNode:
    """Context manager: starts a node and removes its files at the end.

    In between, you may call ``stop`` and ``start`` again; the store stays. ``start`` raises RuntimeError with the end
    of the log if the node does not serve within ``start_seconds``.
    """

    def __init__(self, model: str, start_seconds: float = 180) -> None:
        self.model = model
        self.start_seconds = start_seconds
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory(prefix="kvsidecar-example-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The base URL for OpenAI's SDK."""
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> LocalNode:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        folder = Path(self._folder.name)
        flags = ["--port", str(self._port), "--runtime-dir", str(folder / "run"), "--store", str(folder / "store")]
        environment = {**os.environ, "KVSIDECAR_RUNTIME_DIR": str(folder / "run")}
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(KVSIDECAR), "serve", self.model, *flags, "--arena-bytes", "256MiB"],
                env=environment,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + self.start_seconds
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the node does not serve:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stops the node as `kvsidecar stop` does: running requests finish, then the cache flushes its writes."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(timeout=60)

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url.removesuffix("/v1") + "/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
