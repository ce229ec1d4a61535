"""Running pod of the base manifests: users, read-only roots, shared sockets, a worker's death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.playing import wait_for
from tests.deploy.running_pod import START_SECONDS, Pod, running

pytestmark = pytest.mark.timeout(900)
# What a kubelet asks.
PROBES = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
for probe in sys.argv[1:]:
    port, _, service = probe.partition("/")
    ask = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{port}")).Check
    print(ask(health_pb2.HealthCheckRequest(service=service), timeout=30).status)
"""


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    settings = {"KVSIDECAR_WORKER_POOL_BYTES": "64MiB", "KVSIDECAR_WORKER_RESIDENT_SEQUENCES": "0"}
    with running(tmp_path_factory.mktemp("pod"), "demo", settings) as found:
        yield found


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


def test_a_rolled_pod_is_warm_from_its_volume(pod: Pod) -> None:
    before = pod.ask()
    pod.roll()
    after = pod.ask()
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    usage = after["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
