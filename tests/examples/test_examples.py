"""The examples, run by the command in their first lines, against real processes and the built-in model."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.examples.programs import CACHED, EXAMPLES, cached, run

pytestmark = pytest.mark.timeout(500)
KUBERNETES = "1.34"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_first_lines_have_the_command(path: Path) -> None:
    head = path.read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
    if path.name != "local_node.py":
        assert f"python examples/{path.name}" in head


def test_every_example_is_in_the_index() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = {path.name for path in EXAMPLES.glob("*.py")} - {"local_node.py"}
    assert {name for name in programs if f"({name})" not in index} == set()


def test_rag_reuses_the_documents_of_the_question_before() -> None:
    first, second, _ = cached(run("rag.py"))
    assert first == 0
    assert second > 200


def test_each_step_of_the_agent_reuses_the_step_before() -> None:
    printed = run("agent.py")
    shares = CACHED.findall(printed)
    assert len(shares) == 4
    for before, after in itertools.pairwise(shares):
        assert int(after[0]) >= int(before[1])  # the whole prompt of the step before


@pytest.mark.long
def test_a_chat_continues_from_disk_after_a_restart() -> None:
    last = run("chat_over_restart.py").splitlines()[-1]
    assert int(last.partition("%")[0]) > 50, last


def test_the_kubernetes_overlay_is_valid_and_serves_a_model_in_its_own_namespace() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    built = subprocess.run(
        ["kubectl", "kustomize", EXAMPLES / "kubernetes"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    resources = list(yaml.safe_load_all(built))
    for resource in resources:
        if resource["apiVersion"].split("/")[0] in {"v1", "apps", "policy", "networking.k8s.io", "autoscaling"}:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        if resource["kind"] not in {"Namespace", "ClusterRole", "ClusterRoleBinding"}:
            assert resource["metadata"]["namespace"] == "kvsidecar-example"
    models = [r["data"]["KVSIDECAR_WORKER_MODEL"] for r in resources if "KVSIDECAR_WORKER_MODEL" in r.get("data", {})]
    assert models == ["demo"]
