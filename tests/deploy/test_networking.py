"""Addresses in the manifests, against the code and the programs that use them."""

from __future__ import annotations

import json
import re

import pytest

from cache_daemon.remote.address import parse_remote
from tests.deploy import node_recording
from tests.deploy.manifests import BUILDS, containers, of_kind, pods, settings

REMOTES = [name for name in BUILDS if "remote" in name]


@pytest.mark.parametrize("name", REMOTES)
def test_the_remote_tier_is_one_server_over_tls(name: str) -> None:
    """A server that is not in cluster mode refuses the client of a cluster."""
    given = [settings(name, container) for pod in pods(name) for container in containers(pod)]
    urls = {found["KVSIDECAR_CACHE_REMOTE"] for found in given if "KVSIDECAR_CACHE_REMOTE" in found}
    (address,) = map(parse_remote, urls)
    assert (address.backend, address.cluster, address.tls) == ("valkey", False, True)


def daemon_hosts(name: str) -> list[str]:
    """Return the names by which other pods of the namespace find daemons."""
    most = max((scaler["spec"]["maxReplicas"] for scaler in of_kind(name, "HorizontalPodAutoscaler")), default=1)
    found = ["kvsidecar-daemons"]
    for workload in of_kind(name, "StatefulSet"):
        spec = workload["spec"]
        if "kvsidecar/daemon" in spec["template"]["metadata"]["labels"]:
            found += [f"{workload['metadata']['name']}-{i}.{spec['serviceName']}" for i in range(most)]
    return found


def accepts(entry: str, host: str) -> bool:
    """Return whether gRPC accepts a certificate's name for a host.

    Releases such as 1.76, which our clients may have, match a wildcard only if a dot follows in the rest of the name.
    """
    rest = host.partition(".")[2]
    return entry == host or (entry == f"*.{rest}" and "." in rest)


@pytest.mark.parametrize("name", [name for name in BUILDS if "mtls" in name])
def test_the_daemons_certificate_has_every_name_of_a_daemon(name: str) -> None:
    (certificate,) = [c for c in of_kind(name, "Certificate") if c["metadata"]["name"] == "kvsidecar-cache"]
    entries = certificate["spec"]["dnsNames"]
    assert {"kvsidecar-daemons", "kvsidecar-nodes"} <= {s["metadata"]["name"] for s in of_kind(name, "Service")}
    assert [host for host in daemon_hosts(name) if not any(accepts(entry, host) for entry in entries)] == []


TARGET_LABELS = {"namespace", "service", "pod", "container", "endpoint", "node"}  # the Prometheus operator adds them


def test_prometheus_keeps_the_labels_of_processes_that_the_operator_has_too() -> None:
    """Otherwise it renames a process's ``namespace``, which the dashboard selects by, to ``exported_namespace``."""
    series = json.loads(node_recording.FILE.read_text(encoding="utf-8"))
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in series]
    keeping = {found["instance"].partition(":")[0] for found in labels if TARGET_LABELS & found.keys()}
    ports = {"daemon": "metrics-cache", "worker": "metrics-worker", "gateway": "http"}
    for name in BUILDS:
        (monitor,) = of_kind(name, "ServiceMonitor")
        honored = {end["port"] for end in monitor["spec"]["endpoints"] if end.get("honorLabels")}
        assert honored == {ports[process] for process in keeping}
