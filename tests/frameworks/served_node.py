"""Node as users start it, for programs in another Python environment.

The module imports only the standard library and httpx, so that the other environment needs neither our server nor
torch.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_START_SECONDS = 400.0
# These ports are above the ports of benchmarks.node, and below the ports that Linux gives to clients.
_PORTS = range(32_000, 32_768)
_ROOT = Path(__file__).parents[2]
# The interpreter of the environment with our server.
_PYTHON = os.environ.get("KVSIDECAR_TEST_PYTHON", sys.executable)


@dataclass(frozen=True)
class Server:
    """A running node: its URL, the name of its model, and the folder of the model's tokenizer."""

    url: str
    model: str
    tokenizer: str


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    """Run ``kvsidecar serve`` with SmolLM2 if it is installed, otherwise with the built-in model."""
    found = _of_the_server(
        "from kvsidecar.models.model_library import ModelLibrary as L; print(L().find('smollm2') or '')"
    )
    model = "smollm2" if found else "demo"
    port = _free_port()
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVSIDECAR_")}
    command = [_PYTHON, "-m", "kvsidecar.cli.root_command", "serve", model, "--port", str(port)]
    command += ["--arena-bytes", "128MiB", "--store", str(folder / "store"), *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**own, "XDG_RUNTIME_DIR": str(folder)}, stdout=log, stderr=log, cwd=_ROOT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, folder / "log")
            yield Server(url, model, _tokenizer_of(model))
        finally:
            process.terminate()
            process.wait(60)


def _free_port() -> int:
    """Return a free port that neither Linux nor ``benchmarks.node.free_port`` gives to others meanwhile."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no port is free")


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def _tokenizer_of(model: str) -> str:
    """Return the folder of the model's tokenizer. For a GGUF file, loading the model has written this folder."""
    return _of_the_server(
        "from inference_svc.models.model_resolver import resolve\n"
        f"file = resolve({model!r})\n"
        "homes = [p / 'converted' for p in file.parents if (p / 'converted').is_dir()]\n"
        "print(file if file.is_dir() else next(homes[0].glob(file.stem + '*')))"
    )


def _of_the_server(program: str) -> str:
    command = [_PYTHON, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=_ROOT).stdout.strip()
