"""A manifest's pod under podman. This module does the kubelet's steps that podman 4 lacks.

- A native sidecar becomes a normal container that starts first, because podman waits for the end of init containers.
- Volumes are folders of the host, with the owner and mode that a kubelet would set by fsGroup.
- The image is empty. The machine's own /usr, interpreter and checkout are mounted read-only.
- The pod has no network but its loopback. The test runs the probes.
"""

from __future__ import annotations

import copy
import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import of_kind, settings

IMAGE = "localhost/kvsidecar-empty:test"
_ROOT = Path(__file__).parents[2]
_READABLE = tuple(dict.fromkeys(("/usr", "/etc/ld.so.cache", sys.base_prefix, sys.prefix, str(_ROOT))))
_MERGED = ("bin", "lib", "lib64", "sbin")


# On some machines, not even root may raise limits. Containers then cannot have podman's default limits, which are
# higher.
_CONFIGURATION = """
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile={0}:{0}", "nproc=4096:4096"]
"""


class Podman:
    """podman with its own storage folder, and with the first container runtime that works on this machine."""

    def __init__(self, folder: Path) -> None:
        """Find a runtime. Raises RuntimeError, which lists the attempts, if no container can run."""
        folder.mkdir()
        (folder / "containers.conf").write_text(
            _CONFIGURATION.format(resource.getrlimit(resource.RLIMIT_NOFILE)[1]), encoding="utf-8"
        )
        # podman refuses paths of more than 50 characters.
        self._state = tempfile.mkdtemp(prefix="kvs-")
        self._environment = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        self._command: list[str] = []
        tried = []
        for runtime in filter(shutil.which, ("crun", "runc")):
            self._command = [
                "podman", "--root", str(folder / "storage"), "--runroot", self._state, "--runtime", runtime,
                "--cgroup-manager", "cgroupfs", "--events-backend", "file",
            ]  # fmt: skip
            try:
                self._import_empty_image()
                self("run", "--rm", "--network", "none", "--volume", "/usr:/usr:ro", IMAGE, "true")
                return
            except RuntimeError as error:
                tried.append(f"{runtime}: {str(error).splitlines()[-1]}")
        self.close()
        raise RuntimeError("; ".join(tried) or "neither crun nor runc is installed")

    def __call__(self, *arguments: str, given: bytes = b"", check: bool = True, seconds: float = 120) -> str:
        done = subprocess.run(
            [*self._command, *arguments], input=given, capture_output=True, timeout=seconds, check=False,
            env=self._environment,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"podman {' '.join(arguments)}: {done.stderr.decode()[-2000:]}")
        return done.stdout.decode().strip()

    def close(self) -> None:
        """Remove podman's files outside of its folder, unless a container uses them."""
        shutil.rmtree(self._state, ignore_errors=True)

    def _import_empty_image(self) -> None:
        """Import an image that contains only symbolic links."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name in _MERGED:
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
                tar.addfile(link)
        self("import", "-", IMAGE, given=archive.getvalue())


def pod_of(
    folder: Path, model_settings: dict[str, str], build: str = "base", engine_flags: tuple[str, ...] = ()
) -> str:
    """Return the YAML of a pod and its configuration; create the folders of its volumes in ``folder``.

    Our worker gets ``model_settings`` in addition, and vLLM gets ``engine_flags``.
    """
    (nodes,) = of_kind(build, "StatefulSet")
    template = copy.deepcopy(nodes["spec"]["template"])
    spec = template["spec"]
    first = spec.pop("initContainers")
    for container in first:
        assert container.pop("restartPolicy") == "Always"
    spec["containers"] = [*first, *spec["containers"]]
    claims = [claim["metadata"]["name"] for claim in nodes["spec"]["volumeClaimTemplates"]]
    names = [volume["name"] for volume in spec["volumes"]] + claims
    spec["volumes"] = [_volume(name, _as_a_kubelet_makes_it(folder / f"volume-{name}", spec)) for name in names]
    spec["volumes"] += [_volume(f"host-{i}", Path(path)) for i, path in enumerate(_READABLE)]
    for container in spec["containers"]:
        given = settings(build, container) | (model_settings if container["name"] == "worker" else {})
        _here(container, given, engine_flags)
    for key in ("topologySpreadConstraints", "serviceAccountName", "automountServiceAccountToken"):
        del spec[key]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kvsidecar"}, "spec": spec}
    return yaml.safe_dump(pod)


def _here(container: dict[str, Any], given: dict[str, str], engine_flags: tuple[str, ...]) -> None:
    container["image"], container["imagePullPolicy"] = IMAGE, "Never"
    if container.get("command") == ["vllm", "serve"]:
        # vLLM's CPU build has no command of its own, and podman does not replace variables in arguments.
        container["command"] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
        container["args"] = [given["MODEL"] if a == "$(MODEL)" else a for a in container["args"]]
        container["args"] += engine_flags
    else:
        container["command"] = [sys.executable, "-m", "kvsidecar.cli.root_command"]
    given = given | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p.startswith(str(_ROOT))), "HOME": "/tmp"}
    fields = [e for e in container.get("env", []) if "fieldRef" in e.get("valueFrom", {})]
    container["env"] = fields + [{"name": name, "value": value} for name, value in given.items()]
    container.pop("envFrom", None)
    container["volumeMounts"] += [
        {"name": f"host-{i}", "mountPath": path, "readOnly": True} for i, path in enumerate(_READABLE)
    ]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        container.pop(probe, None)
    del container["resources"], container["ports"]


def _as_a_kubelet_makes_it(path: Path, spec: dict[str, Any]) -> Path:
    path.mkdir()
    os.chown(path, 0, spec["securityContext"]["fsGroup"])
    path.chmod(0o2777)
    return path


def _volume(name: str, path: Path) -> dict[str, Any]:
    return {"name": name, "hostPath": {"path": str(path)}}


def wait_for(condition: Any, seconds: float) -> Any:
    """Return the first true result of ``condition``. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.2)
    return answer
