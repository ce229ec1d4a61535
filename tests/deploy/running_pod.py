"""Pod under podman; requests come from inside its network namespace."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.playing import Podman, pod_of, wait_for

START_SECONDS = 400  # start of a model on a busy machine
PROMPT = "The harbour was quiet that morning, and the boats lay still. " * 24
CLONE_NEWNET = 0x40000000  # <linux/sched.h>


def podman_in(folder: Path) -> Podman:
    """Return podman. Skips the test with the reason if no pod can run."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed (Debian: podman runc catatonit)")
    if os.geteuid() != 0:
        pytest.skip("folders as a kubelet makes them need root")
    try:
        return Podman(folder)
    except RuntimeError as error:
        pytest.skip(f"podman does not work here: {error}")


class Pod:
    """Running pod of a manifest. Its volumes are in the folder of the manifest."""

    def __init__(self, podman: Podman, manifest: Path, model: str) -> None:
        self.podman, self._manifest, self._model = podman, manifest, model
        self._play()

    def roll(self) -> None:
        """End the pod as a kubelet does, and start a new one with the same claims and an empty volume ``run``."""
        self.podman("pod", "stop", "--time", "75", "kvsidecar", seconds=200)
        self.podman("pod", "rm", "--force", "kvsidecar")
        for left in (self._manifest.parent / "volume-run").iterdir():
            shutil.rmtree(left)
        self._play()

    def inside(self, container: str, script: str, *arguments: str) -> str:
        """Run a Python script in a container; return its output."""
        return self.podman("exec", f"kvsidecar-{container}", sys.executable, "-c", script, *arguments, check=False)

    def ask(self) -> dict[str, Any]:
        """Return the answer to the prompt; empty while the pod does not serve."""
        return self._in_its_network.submit(_ask, self._model).result()

    def state(self, container: str) -> tuple[int, bool]:
        """Return a container's process id, and whether it runs."""
        said = self.podman("inspect", "--format", "{{.State.Pid}} {{.State.Running}}", f"kvsidecar-{container}")
        pid, _, running = said.partition(" ")
        return int(pid), running == "true"

    def user(self, container: str) -> list[str]:
        """Return real, effective and saved user of a container's process."""
        lines = Path(f"/proc/{self.state(container)[0]}/status").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("Uid:")).split()[1:]

    def _play(self) -> None:
        self.podman("kube", "play", "--network", "none", str(self._manifest))
        network = f"/proc/{self.state('cache')[0]}/ns/net"
        self._in_its_network = ThreadPoolExecutor(1, initializer=_enter, initargs=(network,))
        try:
            wait_for(self.ask, START_SECONDS)
        except TimeoutError as error:
            names = self.podman("ps", "--all", "--format", "{{.Names}}").split()
            logs = [self.podman("logs", name, check=False) for name in names if name.startswith("kvsidecar-")]
            raise AssertionError("\n".join(log[-1500:] for log in logs)) from error


@contextmanager
def running(folder: Path, model: str, *pod: Any) -> Iterator[Pod]:
    """Run the pod of ``pod_of(folder, *pod)`` while the ``with`` block runs. Skips the test if no pod can run."""
    podman = podman_in(folder / "podman")
    manifest = folder / "pod.yaml"
    manifest.write_text(pod_of(folder, *pod), encoding="utf-8")
    try:
        yield Pod(podman, manifest, model)
    finally:
        podman("pod", "rm", "--force", "--time", "5", "kvsidecar", check=False)
        podman("rmi", "--all", "--force", check=False)
        podman.close()


def _enter(network: str) -> None:
    """Move this thread into the pod's network namespace, so that its sockets belong to the namespace."""
    with Path(network).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _ask(model: str) -> dict[str, Any]:
    connection = HTTPConnection("127.0.0.1", 8000, timeout=60)
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        return found if answer.status == 200 else {}
    except OSError:
        return {}
    finally:
        connection.close()
