"""One version: the packaging reads ``kvsidecar.__version__``."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import yaml
from kvsidecar import __version__

from tests.deploy.installation import ROOT

KUSTOMIZATIONS = sorted((ROOT / "deploy" / "kubernetes").rglob("kustomization.yaml"))


def test_the_packaging_reads_the_version_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kvsidecar.__version__"}


def test_the_typescript_client_has_it() -> None:
    folder = ROOT / "clients" / "typescript"
    lock = json.loads((folder / "package-lock.json").read_text())
    assert json.loads((folder / "package.json").read_text())["version"] == __version__
    assert lock["version"] == lock["packages"][""]["version"] == __version__


def test_the_manifests_have_its_images() -> None:
    tags = [
        image["newTag"]
        for path in KUSTOMIZATIONS
        for image in yaml.safe_load(path.read_text()).get("images", [])
        if image["name"] == "kvsidecar"
    ]
    written = "".join(path.read_text() for path in (ROOT / "deploy" / "kubernetes").rglob("*.yaml"))
    tags += re.findall(r"image: kvsidecar(?:-vllm)?:(\S+)", written)
    assert len(tags) >= 4
    assert {tag.removesuffix("-cuda") for tag in tags} == {__version__}


@pytest.mark.parametrize("name", ["container/Containerfile", "container/Containerfile.vllm", "README.md"])
def test_the_commands_that_build_images_name_it(name: str) -> None:
    named = re.findall(r"kvsidecar(?:-vllm)?:(\d+\.\d+\.\d+)", (ROOT / "deploy" / name).read_text())
    assert named
    assert set(named) == {__version__}


@pytest.mark.parametrize("name", ["container/Containerfile", "container/Containerfile.vllm", "README.md"])
def test_the_commands_that_build_images_leave_out_what_is_not_the_source(name: str) -> None:
    """The command for CUDA did not: environments of gigabytes, and kernels of another C library, got into the image."""
    found = re.findall(r"podman build .*", (ROOT / "deploy" / name).read_text())
    assert found
    assert [line for line in found if "--ignorefile deploy/container/ignore" not in line] == []


def test_the_changelog_has_it() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_lowest_versions_that_are_allowed_load_the_stubs() -> None:
    """A stub refuses a runtime that is older than its generator, so that no kernel was even named."""
    wanted = " ".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    allowed = {name: numbers(version) for name, version in re.findall(r"(grpcio|protobuf)>=([\d.]+)", wanted)}
    stubs = [path.read_text() for path in (ROOT / "clients" / "python" / "kvsidecar").rglob("*_pb2*.py")]
    made = [numbers(found) for stub in stubs for found in re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stub)]
    runtime = re.compile(r"ValidateProtobufRuntimeVersion\(\s*[\w.]+,\s*(\d+),\s*(\d+),\s*(\d+)")
    needed = [tuple(map(int, found)) for stub in stubs for found in runtime.findall(stub)]
    assert made
    assert needed
    assert max(made) <= allowed["grpcio"]
    assert max(needed) <= allowed["protobuf"]


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's three numbers."""
    found = [*map(int, version.split(".")), 0, 0]
    return tuple(found[:3])
