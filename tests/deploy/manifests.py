"""Rendered manifests, as a cluster would get them."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

Resource = dict[str, Any]
DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
BUILDS = ["base", *sorted(f"overlays/{p.name}" for p in (KUBERNETES / "overlays").iterdir())]


@cache
def _built(name: str) -> list[Resource]:
    command = next((c for c in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(c[0])), None)
    if command is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*command, str(KUBERNETES / name)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def resources(name: str) -> list[Resource]:
    """Return all resources of ``base`` or ``overlays/NAME``, read-only.

    Skips the test if no program can render them.
    """
    return _built(name)


def of_kind(name: str, *kinds: str) -> list[Resource]:
    return [r for r in resources(name) if r["kind"] in kinds]


def pods(name: str) -> list[Resource]:
    """Return the specifications of all pods."""
    return [r["spec"]["template"]["spec"] for r in of_kind(name, "StatefulSet", "DaemonSet", "Deployment", "Job")]


def containers(pod: Resource) -> list[Resource]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def settings(name: str, container: Resource) -> dict[str, str]:
    """Return a container's environment, without cluster-provided values."""
    maps = {r["metadata"]["name"]: r["data"] for r in of_kind(name, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    return found | {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}
