"""Running pod of the base manifests: users, read-only roots, shared sockets, a worker's death."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.playing import Podman, pod_of, wait_for

pytestmark = pytest.mark.timeout(400)
START_SECONDS = 200  # of a model, with room for a machine that does much else
PROMPT = "The harbour was quiet that morning, and the boats lay still. " * 12
CLONE_NEWNET = 0x40000000  # <linux/sched.h>
# What a kubelet asks.
PROBES = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
for probe in sys.argv[1:]:
    port, _, service = probe.partition("/")
    ask = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{port}")).Check
    print(ask(health_pb2.HealthCheckRequest(service=service), timeout=30).status)
"""


def podman_in(folder: Path) -> Podman:
    """Return podman; skips the test, with the reason, if no pod can run."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed (Debian: podman runc catatonit)")
    if os.geteuid() != 0:
        pytest.skip("folders as a kubelet makes them need root")
    try:
        return Podman(folder)
    except RuntimeError as error:
        pytest.skip(f"podman does not work here: {error}")


class Pod:
    """Running pod."""

    def __init__(self, podman: Podman) -> None:
        self.podman = podman
        network = f"/proc/{self.state('gateway')[0]}/ns/net"
        self._in_its_network = ThreadPoolExecutor(1, initializer=_enter, initargs=(network,))

    def inside(self, container: str, script: str, *arguments: str) -> str:
        """Run a Python script in a container; return its output."""
        return self.podman("exec", f"kvsidecar-{container}", sys.executable, "-c", script, *arguments, check=False)

    def ask(self) -> dict[str, Any]:
        """Return the gateway's answer to the prompt; empty without a worker."""
        return self._in_its_network.submit(_ask).result()

    def state(self, container: str) -> tuple[int, bool]:
        """Return ``(pid, running)``."""
        said = self.podman("inspect", "--format", "{{.State.Pid}} {{.State.Running}}", f"kvsidecar-{container}")
        pid, _, running = said.partition(" ")
        return int(pid), running == "true"

    def user(self, container: str) -> list[str]:
        """Return real, effective and saved user of a container's process."""
        lines = Path(f"/proc/{self.state(container)[0]}/status").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("Uid:")).split()[1:]


def _enter(network: str) -> None:
    """Move this thread, and the sockets that it opens, into the pod's network namespace."""
    with Path(network).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _ask() -> dict[str, Any]:
    connection = HTTPConnection("127.0.0.1", 8000, timeout=60)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 6, "temperature": 0})
    try:
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        return found if answer.status == 200 else {}
    except OSError:
        return {}
    finally:
        connection.close()


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    folder = tmp_path_factory.mktemp("pod")
    podman = podman_in(folder / "podman")
    manifest = folder / "pod.yaml"
    settings = {"KVSIDECAR_WORKER_POOL_BYTES": "64MiB", "KVSIDECAR_WORKER_RESIDENT_SEQUENCES": "0"}
    manifest.write_text(pod_of(folder, settings), encoding="utf-8")
    try:
        podman("kube", "play", "--network", "none", str(manifest))
        found = Pod(podman)
        try:
            wait_for(found.ask, START_SECONDS)
        except TimeoutError as error:
            logs = [podman("logs", f"kvsidecar-{name}", check=False) for name in ("cache", "worker", "gateway")]
            raise AssertionError("\n".join(log[-1500:] for log in logs)) from error
        yield found
    finally:
        podman("pod", "rm", "--force", "--time", "5", "kvsidecar", check=False)
        podman("rmi", "--all", "--force", check=False)
        podman.close()


def test_probes_are_answered_at_the_ports_of_the_manifests(pod: Pod) -> None:
    probes = ("7401/", "7401/kvsidecar.cache.v1.CacheService", "7402/kvsidecar.inference.v1.InferenceService")
    assert pod.inside("gateway", PROBES, *probes).split() == ["1", "1", "1"]


def test_all_are_one_user_and_cannot_write_to_their_root(pod: Pod) -> None:
    for container in ("cache", "worker", "gateway"):
        assert set(pod.user(container)) == {"10001"}
        assert pod.inside(container, "import os; print(os.statvfs('/').f_flag & os.ST_RDONLY)") == "1"


def test_memory_is_handed_from_container_to_container(pod: Pod) -> None:
    """The worker maps arena and staging of the daemon in another container."""
    maps = Path(f"/proc/{pod.state('worker')[0]}/maps").read_text(encoding="utf-8")
    assert "/memfd:kvsidecar" in maps, [line for line in maps.splitlines() if "memfd" in line]


def test_a_workers_death_leaves_the_next_request_warm(pod: Pod) -> None:
    before = pod.ask()
    daemon, (worker, _) = pod.state("cache"), pod.state("worker")
    os.kill(worker, signal.SIGKILL)  # `podman kill` would be taken for the user's wish, and nothing started again
    wait_for(lambda: pod.state("worker")[1] and pod.state("worker")[0] != worker, START_SECONDS)
    after = wait_for(pod.ask, START_SECONDS)
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    usage = after["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
    assert pod.state("cache") == daemon
