"""Manifests: strictly valid, with settings that the processes accept and matching listeners."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kvsidecar.byte_sizes import parse_size
from kvsidecar.cli.root_command import app
from kvsidecar.cli.warm import texts
from typer.main import get_command

from cache_daemon.config import DaemonConfig
from cache_daemon.store import shutdown
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.server.worker_config import WorkerConfig
from tests.deploy.custom_resources import SCHEMAS
from tests.deploy.manifests import (
    BUILDS,
    DEPLOY,
    WORKLOADS,
    Resource,
    combined,
    containers,
    of_kind,
    pods,
    resources,
    settings,
)

KUBERNETES = "1.34"  # the first whose resource claims are stable


@dataclass(frozen=True)
class EngineConfig:
    """Settings of vLLM in the manifests."""

    cache_socket: Path
    port: int


OURS: dict[str, Any] = {"daemon": DaemonConfig, "worker": WorkerConfig, "gateway": GatewayConfig}
STORE_BYTES_PER_SECOND = 32 << 20  # of a daemon that repairs or compacts its store on a slow disk
OVERHEAD = 512 << 20  # of a daemon, beside its memory for chunks


def check(resource: Resource) -> None:
    custom = SCHEMAS.get(resource["kind"])
    if custom is not None:
        custom.model_validate(resource)
    else:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def process_of(container: Resource) -> str:
    if container.get("command") == ["vllm", "serve"]:
        return "vllm"
    return str(container["args"][0]) if "args" in container else ""


def built(name: str) -> list[tuple[Resource, Resource]]:
    """Return ``(pod, container)`` for each of our services, and for vLLM."""
    return [(pod, c) for pod in pods(name) for c in containers(pod) if process_of(c) in {*OURS, "vllm"}]


def selects(selector: Resource, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches labels. The manifests use only the operator In."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def config_of(name: str, container: Resource, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a container's settings as the process reads them. Raises ValidationError."""
    if process_of(container) == "vllm":
        (port,) = [a.removeprefix("--port=") for a in container["args"] if a.startswith("--port=")]
        return EngineConfig(Path(settings(name, container)["KVSIDECAR_CACHE_SOCKET"]), int(port))
    with monkeypatch.context() as patch:
        for key, value in settings(name, container).items():
            patch.setenv(key, value)
        return OURS[process_of(container)]()


@pytest.mark.parametrize("name", BUILDS)
def test_resources_are_valid_to_the_letter(name: str) -> None:
    for resource in resources(name):
        check(resource)


def test_a_misspelt_field_is_refused() -> None:
    for resource in resources("overlays/mtls"):
        broken = copy.deepcopy(resource)
        broken["speck"] = {}
        with pytest.raises((ValueError, kubernetes_validate.ValidationError)):
            check(broken)


def test_the_lowest_kubernetes_that_is_named_has_what_the_base_uses() -> None:
    """Kubernetes 1.29 has the sleep of a hook behind a feature gate that is off, and refuses pods with it."""
    files = [DEPLOY / "README.md", DEPLOY / "kubernetes" / "base" / "kustomization.yaml"]
    named = [re.findall(r"Kubernetes\s+(?:# )?1\.(\d+)(?: or newer|, because)", f.read_text()) for f in files]
    hooks = [c["lifecycle"]["preStop"] for pod in pods("base") for c in containers(pod) if "lifecycle" in c]
    assert [hook.keys() for hook in hooks] == [{"sleep"}] * 2
    assert named == [["30"]] * 2
    for resource in resources("base"):
        if resource["kind"] not in SCHEMAS:
            kubernetes_validate.validate(resource, "1.30", strict=True)


@pytest.mark.parametrize("name", BUILDS)
def test_settings_are_those_of_the_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, container in built(name):
        if process_of(container) == "vllm":
            continue
        config = OURS[process_of(container)]
        prefix = config.model_config["env_prefix"]
        given = {k.removeprefix(prefix).lower() for k in settings(name, container) if k.startswith(prefix)}
        assert given
        assert given <= config.model_fields.keys()
        config_of(name, container, monkeypatch)


@pytest.mark.parametrize("name", BUILDS)
def test_nothing_runs_with_more_rights_than_it_needs(name: str) -> None:
    for pod in pods(name):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        assert not {"hostNetwork", "hostPID"} & pod.keys()
        assert not pod.get("hostIPC", False)
        for container in containers(pod):
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"]
            assert not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert {"requests", "limits"} <= container["resources"].keys()


@pytest.mark.parametrize("name", BUILDS)
def test_who_shares_memory_is_one_user_in_a_folder_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon checks SO_PEERCRED and needs a private folder; a mounted volume belongs to root."""
    users = {pod["securityContext"]["runAsUser"] for pod in pods(name)}
    assert len(users) == 1
    for _, container in built(name):
        if process_of(container) != "gateway":
            assert "runAsUser" not in container["securityContext"]
        config = config_of(name, container, monkeypatch)
        if getattr(config, "nodes", ""):
            continue  # it reaches others by their address
        sockets = [getattr(config, field, None) for field in ("socket", "cache_socket")]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for socket in filter(None, sockets):
            assert str(socket.parent) not in mounts
            assert str(socket.parent.parent) in mounts


@pytest.mark.parametrize("name", BUILDS)
def test_commands_in_a_container_look_where_its_sockets_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``kvsidecar status`` and ``doctor`` refuse the volume's own folder, which belongs to root."""
    for _, container in built(name):
        config = config_of(name, container, monkeypatch)
        if process_of(container) == "vllm" or getattr(config, "nodes", ""):
            continue  # it has no sockets of workers
        sockets = config.targets if process_of(container) == "gateway" else [config.socket]
        folder = settings(name, container).get("KVSIDECAR_RUNTIME_DIR", "")
        assert {str(Path(socket).parent) for socket in sockets} == {folder}, container["name"]


@pytest.mark.parametrize("name", BUILDS)
def test_the_daemon_that_workers_ask_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(process_of(c), config_of(name, c, monkeypatch)) for _, c in built(name)]
    daemons = {config.socket for process, config in found if process == "daemon"}
    workers = [config for process, config in found if process == "worker"]
    engines = [config for process, config in found if process == "vllm"]
    gateways = [config for process, config in found if process == "gateway" and not config.nodes]
    assert {asking.cache_socket for asking in (*workers, *engines, *gateways)} == daemons
    assert bool(workers) == bool(gateways) != bool(engines)
    for gateway in gateways:
        assert sorted(gateway.targets) == sorted(str(worker.socket) for worker in workers)


@pytest.mark.parametrize("name", BUILDS)
def test_a_socket_lies_on_one_volume_for_all_who_name_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal paths in two containers may be different folders."""
    behind: dict[Path, list[Resource]] = {}
    for pod, container in built(name):
        config = config_of(name, container, monkeypatch)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in container["volumeMounts"]}
        for field in ("socket", "cache_socket"):
            socket = getattr(config, field, None)
            if socket is not None:
                volume = {key: value for key, value in mounts[str(socket.parent.parent)].items() if key != "name"}
                behind.setdefault(socket, []).append(volume)
    for socket, found in behind.items():
        assert all(volume == found[0] for volume in found), socket
    assert any(len(found) > 1 for found in behind.values())


@pytest.mark.parametrize("name", BUILDS)
def test_a_daemon_may_read_its_whole_store_before_it_must_listen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It repairs or compacts the store before it listens; the kubelet would kill it again and again meanwhile."""
    for _, container in built(name):
        if process_of(container) == "daemon":
            probe = container["startupProbe"]
            allowed = probe["periodSeconds"] * probe["failureThreshold"]
            assert allowed >= config_of(name, container, monkeypatch).store_bytes / STORE_BYTES_PER_SECOND, allowed


@pytest.mark.parametrize("name", BUILDS)
def test_probes_and_metrics_are_where_the_processes_listen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, container in built(name):
        config = config_of(name, container, monkeypatch)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert {"startupProbe", "livenessProbe"} <= container.keys()
        # Requests are answered without a daemon, so the state of one beside a worker must not stop them.
        assert ("readinessProbe" in container) != (container.get("restartPolicy") == "Always")
        for probe in probes:
            if "grpc" in probe:
                assert config.health_tcp == f"0.0.0.0:{probe['grpc']['port']}"
            else:
                assert ports[next(iter(p for p in probe.values() if isinstance(p, dict)))["port"]] == config.port
        if process_of(container) in {"daemon", "worker"}:
            assert (config.metrics_host, config.metrics_port in ports.values()) == ("0.0.0.0", True)


@pytest.mark.parametrize("name", BUILDS)
def test_services_policies_and_monitors_name_ports_that_exist(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {port["name"] for _, container in built(name) for port in container["ports"]}
    daemons = [config_of(name, c, monkeypatch) for _, c in built(name) if process_of(c) == "daemon"]
    listeners = {int(str(daemon.tcp).rpartition(":")[2]) for daemon in daemons if daemon.tcp}
    services = of_kind(name, "Service")
    targets = {port["targetPort"] for service in services for port in service["spec"]["ports"]}
    allowed = {
        port["port"]
        for policy in of_kind(name, "NetworkPolicy")
        for rule in policy["spec"].get("ingress", [])
        for port in rule["ports"]
    }
    (monitor,) = of_kind(name, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = [s for s in services if wanted <= s["metadata"].get("labels", {}).items()]
    named = {port["name"] for service in scraped for port in service["spec"]["ports"]}
    assert targets <= ports | listeners
    assert allowed <= ports | listeners
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= named
    assert {port for port in ports if port.startswith("metrics-")} <= {e["port"] for e in monitor["spec"]["endpoints"]}


@pytest.mark.parametrize("name", BUILDS)
def test_policies_select_our_pods_and_no_other_pod_of_the_namespace(name: str) -> None:
    """A policy that selects a foreign pod closes its way to KVSidecar and to its own services."""
    ours = [r["spec"]["template"]["metadata"]["labels"] for r in of_kind(name, *WORKLOADS)]
    for policy in of_kind(name, "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        assert any(selects(selector, labels) for labels in ours), policy["metadata"]["name"]
        for foreign in ({}, {"app": "client"}, {"app.kubernetes.io/name": "client"}):
            assert not selects(selector, foreign), policy["metadata"]["name"]


@pytest.mark.parametrize("name", BUILDS)
def test_policies_let_daemons_reach_their_remote_tier(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = [r["spec"]["template"] for r in of_kind(name, "StatefulSet", "DaemonSet")]
    for template in templates:
        for container in containers(template["spec"]):
            if process_of(container) != "daemon" or not config_of(name, container, monkeypatch).remote:
                continue
            labels = template["metadata"]["labels"].items()
            opened = [
                port["port"]
                for policy in of_kind(name, "NetworkPolicy")
                if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= labels
                for rule in policy["spec"].get("egress", [])
                for port in rule["ports"]
            ]
            assert {53, 6379} <= set(opened)


@pytest.mark.parametrize("name", BUILDS)
def test_what_a_daemon_is_told_to_read_is_mounted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, container in built(name):
        if process_of(container) == "daemon":
            config = config_of(name, container, monkeypatch)
            mounts = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
            files = [config.remote_ca, config.tls_cert, config.tls_key, config.tls_client_ca, config.tenants]
            assert {file.parent for file in files if file is not None} <= mounts


@pytest.mark.parametrize("name", BUILDS)
def test_a_model_outlives_its_pod(name: str) -> None:
    (nodes,) = of_kind(name, "StatefulSet")
    claims = {claim["metadata"]["name"] for claim in nodes["spec"]["volumeClaimTemplates"]}
    worker = next(c for c in containers(nodes["spec"]["template"]["spec"]) if c["name"] == "worker")
    assert {m["mountPath"] for m in worker["volumeMounts"] if m["name"] in claims} == {"/var/cache/kvsidecar"}
    assert settings(name, worker)["XDG_DATA_HOME"] == "/var/cache", "of the weights' digests, in the folder kvsidecar"


@pytest.mark.parametrize("name", BUILDS)
def test_a_daemons_memory_fits_into_its_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = sum(process_of(c) in {"worker", "vllm"} for _, c in built(name))
    for _, container in built(name):
        if process_of(container) == "daemon":
            config = config_of(name, container, monkeypatch)
            arena = config.host_arena_bytes
            limit = parse_size(container["resources"]["limits"]["memory"].replace("Gi", "GiB"))
            assert arena + workers * config.staging_bytes + OVERHEAD <= limit


def test_the_daemon_outlives_the_worker_and_ends_after_it() -> None:
    (pod,) = pods("base")
    assert [(c["name"], c["restartPolicy"]) for c in pod["initContainers"]] == [("cache", "Always")]
    worker = next(c for c in pod["containers"] if process_of(c) == "worker")
    drained = worker["lifecycle"]["preStop"]["sleep"]["seconds"] + WorkerConfig(model="demo").drain_seconds
    assert pod["terminationGracePeriodSeconds"] >= drained + shutdown.SECONDS
    run = next(volume for volume in pod["volumes"] if volume["name"] == "run")
    assert run["emptyDir"]["medium"] == "Memory"


def test_vllm_finishes_its_answers_before_it_is_told_to_end() -> None:
    (pod,) = pods("overlays/vllm")
    (engine,) = [c for c in containers(pod) if process_of(c) == "vllm"]
    sleep = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep >= GatewayConfig().drain_seconds
    assert pod["terminationGracePeriodSeconds"] >= sleep + shutdown.SECONDS


@pytest.mark.parametrize("name", ["base", "overlays/fleet"])
def test_a_gateway_drains_within_its_grace_period(name: str) -> None:
    for pod in pods(name):
        for container in containers(pod):
            if process_of(container) == "gateway":
                sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
                assert pod["terminationGracePeriodSeconds"] >= sleep + GatewayConfig().drain_seconds + 5


def test_the_readmes_patch_puts_daemons_only_where_our_pods_run() -> None:
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    (block,) = [part for part in readme.split("\n\n") if part.startswith("    patches:")]
    built = combined("node-cache", **yaml.safe_load(block))
    chosen = [r["spec"]["template"]["spec"].get("nodeSelector") for r in built if r["kind"] in WORKLOADS]
    assert chosen == [{"kvsidecar": "true"}] * 2


def test_one_gpu_is_claimed_for_the_whole_pod() -> None:
    (pod,) = pods("overlays/gpu-shared")
    holders = [c["name"] for c in containers(pod) if c["resources"].get("claims") == [{"name": "gpu"}]]
    assert holders == ["cache", "worker", "worker-1"]
    (template,) = of_kind("overlays/gpu-shared", "ResourceClaimTemplate")
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}]


def test_keys_of_certificates_are_closed_to_others() -> None:
    (pod,) = pods("overlays/mtls")
    volumes = {v["name"]: v for v in pod["volumes"]}
    modes = [volumes["tls"]["secret"]["defaultMode"], volumes["tenants"]["configMap"]["defaultMode"]]
    assert modes == [0o440, 0o440]


def test_the_gateways_of_a_fleet_find_the_pods_and_may_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "overlays/fleet"
    (config,) = [c for c in (config_of(name, c, monkeypatch) for _, c in built(name)) if getattr(c, "nodes", "")]
    (place,) = config.node_addresses
    (service,) = [s for s in of_kind(name, "Service") if s["metadata"]["name"] == place.host]
    assert service["spec"]["clusterIP"] == "None"
    assert place.port in {port["port"] for port in service["spec"]["ports"]}
    (policy,) = [p for p in of_kind(name, "NetworkPolicy") if p["metadata"]["name"] == "kvsidecar-fleet"]
    assert any({"port": place.port, "protocol": "TCP"} in rule["ports"] for rule in policy["spec"]["egress"])


def test_a_job_warms_with_what_the_command_takes(tmp_path: Path) -> None:
    (job,) = of_kind("overlays/fleet", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (prompts,) = [m["data"] for m in of_kind("overlays/fleet", "ConfigMap") if "prompts.jsonl" in m["data"]]
    listed = tmp_path / "prompts.jsonl"
    listed.write_text(prompts["prompts.jsonl"])
    assert texts([listed])
    mounted, *flags = container["args"][1:]
    taken = {option for parameter in get_command(app).commands["warm"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert mounted == "/etc/kvsidecar/prompts/prompts.jsonl"
    assert {flag.partition("=")[0] for flag in flags} <= taken
