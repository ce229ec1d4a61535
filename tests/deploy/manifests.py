"""Kubernetes manifests, rendered as a cluster would get them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

Resource = dict[str, Any]
DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMBINATIONS = [
    "remote+fleet",
    "cpu+fleet+remote+mtls",
    "gpu+fleet+remote",
    "remote+node-cache",
    "node-cache+fleet+remote+mtls+gpu",
    "gpu-shared+fleet+remote+mtls",
    "vllm+remote+mtls",
    "remote+mtls+node-cache+vllm+gpu",
]
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment", "Job")
BUILDS = ["base", *sorted(f"overlays/{p.name}" for p in (KUBERNETES / "overlays").iterdir()), *COMBINATIONS]


@cache
def _built(name: str) -> list[Resource]:
    if "+" in name:
        return combined(name)
    return _rendered(KUBERNETES / name)


def combined(components: str, **further: Any) -> list[Resource]:
    """Render an overlay that has the components ``A+B`` in this order, and further fields of a Kustomization."""
    with tempfile.TemporaryDirectory() as made:
        return _rendered(_overlay(components, Path(made), further))


def _rendered(folder: Path) -> list[Resource]:
    command = next((c for c in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(c[0])), None)
    if command is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def _overlay(components: str, folder: Path, further: dict[str, Any]) -> Path:
    above = os.path.relpath(KUBERNETES, folder)
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{above}/base"],
        "components": [f"{above}/components/{name}" for name in components.split("+")],
        **further,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    return folder


def resources(name: str) -> list[Resource]:
    """Return all resources of ``base``, of ``overlays/NAME``, or of the components ``A+B``.

    The result is shared, so the caller must not change it. Skips the test if no program can render manifests.
    """
    return _built(name)


def of_kind(name: str, *kinds: str) -> list[Resource]:
    return [r for r in resources(name) if r["kind"] in kinds]


def pods(name: str) -> list[Resource]:
    """Return the pod specifications of all workloads."""
    return [r["spec"]["template"]["spec"] for r in of_kind(name, *WORKLOADS)]


def containers(pod: Resource) -> list[Resource]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def settings(name: str, container: Resource) -> dict[str, str]:
    """Return the environment variables of a container, without values that only a cluster knows."""
    maps = {r["metadata"]["name"]: r["data"] for r in of_kind(name, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    for variable in container.get("env", []):
        reference = variable.get("valueFrom", {}).get("configMapKeyRef")
        if reference is not None:
            found[variable["name"]] = maps[reference["name"]][reference["key"]]
        elif "value" in variable:
            found[variable["name"]] = variable["value"]
    return found
