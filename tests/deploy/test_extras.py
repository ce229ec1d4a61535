"""Packages of each extra: base without torch, gateway without torch, worker."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvsidecar.extras import PACKAGES
from packaging.utils import canonicalize_name

from tests.deploy.installation import (
    ROOT,
    build,
    closure,
    copy_checkout,
    copy_libraries,
    declared,
    environment_of,
    run,
    without_paths,
)
from tests.deploy.playing import wait_for

pytestmark = pytest.mark.timeout(900)
WORKER_ONLY = {"torch", "transformers", "llguidance", "safetensors", "gguf", "huggingface_hub", "fastapi", "uvicorn"}
# Modules that need an extra, or an engine around them: of engines, of events, of encryption.
OF_EXTRAS = ("kvsidecar.integrations.", "kvsidecar.kv_transfer.", "kvsidecar.events.", "cache_daemon.durable.xaes_gcm")
# Of an installed engine; the base installation has the modules that import them, and imports none of these itself.
OF_ENGINES = {"torch", "vllm", "sglang", "lmcache"}
MAX_BASE_MB = 160
EXPORTS = "import importlib.util as i, sys; print(*(n for n in sys.argv[1:] if i.find_spec(n)))"
IMPORT_ALL = """
import importlib, pkgutil, sys
for package in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, error.name.split(".")[0])
"""
STORES = """
import sys
import grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb, chunk_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.chunk_layout import Geometry, new_header
shape = dict(layers=2, kv_heads=1, head_dim=8, dtype=chunk_pb2.DATA_TYPE_BFLOAT16, bits=16)
descriptor = chunk_pb2.NamespaceDescriptor(
    model_fingerprint=bytes(32), architecture="A", format_version=2, tensor_parallel_size=1, **shape
)
root = keys.tenant_root(keys.namespace_id(descriptor), b"")
header = new_header(Geometry.of(descriptor), [1, 2, 3], 0)
header.parent_prefix_hash = root
data = bytes(range(256)) * (header.payload_bytes // 256) + bytes(header.payload_bytes % 256)
header.checksum = keys.checksum(data)
stub = CacheServiceStub(grpc.insecure_channel(f"unix:{sys.argv[1]}"))
start = pb.StoreStart(descriptor=descriptor, header=header)
stored = stub.Store(iter([pb.StoreRequest(start=start), pb.StoreRequest(data=data)]), timeout=60)
request = pb.FetchRequest(namespace=keys.namespace_id(descriptor), prefix_hash=stored.prefix_hash)
assert b"".join(part.data for part in stub.Fetch(request, timeout=60)) == data
print("chunks", stub.Stats(pb.StatsRequest(), timeout=60).chunks)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extras")
    copy_checkout(folder / "checkout")
    copy_libraries(folder / "checkout")
    return build("build_wheel", folder / "checkout", folder / "made", ".whl")


@pytest.fixture(scope="module")
def base(wheel: Path) -> Path:
    return environment_of(wheel, wheel.parent.parent / "base")


@pytest.fixture(scope="module")
def gateway(wheel: Path) -> Path:
    return environment_of(wheel, wheel.parent.parent / "gateway", "gateway")


def python(environment: Path, *arguments: str) -> str:
    return run(str(environment / "bin" / "python"), *arguments, folder=environment)


def command(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = str(environment / "bin" / "kvsidecar")
    return subprocess.run(
        [program, *arguments],
        env=without_paths(),
        cwd=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_base_has_no_package_of_the_worker(base: Path) -> None:
    assert python(base, "-c", EXPORTS, "grpc", *sorted(WORKER_ONLY | OF_ENGINES)).split() == ["grpc"]


def test_the_base_is_small(base: Path) -> None:
    """Counts all files of site-packages except byte code."""
    files = [Path(folder) / n for folder, _, names in os.walk(base / "lib") for n in names if not n.endswith(".pyc")]
    assert sum(file.stat().st_size for file in files) <= MAX_BASE_MB * 1e6


@pytest.mark.parametrize("name", ["serve", "worker", "verify", "quantize", "gateway"])
def test_a_command_without_its_packages_names_the_extra(base: Path, name: str) -> None:
    done = command(base, name)
    extra = "gateway" if name == "gateway" else "worker"
    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    named = "fastapi, starlette, uvicorn" if extra == "gateway" else "torch, transformers, llguidance and 8 more"
    assert sentence == (
        f"kvsidecar {name} needs packages that are not installed ({named}): pip install 'kvsidecar[{extra}]'"
    )


def test_pulling_a_model_and_the_python_api_name_the_extra(base: Path) -> None:
    done = command(base, "pull", "smollm2-135m")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(": pip install 'kvsidecar[worker]'\n")
    caught = "try:\n    from inference_svc import Engine\nexcept ImportError as error:\n    print(error)"
    assert python(base, "-c", caught).endswith("pip install 'kvsidecar[worker]'\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["daemon", "--help"],
        ["chat", "--help"],
        ["bench", "--help"],
        ["cost", "--help"],
        ["cache", "verify", "--help"],
        ["models"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_the_other_commands_run_in_the_base(base: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = command(base, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_shell_completes_in_the_base(base: Path) -> None:
    program = str(base / "bin" / "kvsidecar")
    asked = {"_KVSIDECAR_COMPLETE": "complete_bash", "COMP_WORDS": "kvsidecar se", "COMP_CWORD": "1"}
    done = subprocess.run(
        [program], env=without_paths() | asked, cwd=base, capture_output=True, text=True, timeout=60, check=False
    )
    assert "serve" in done.stdout.split(), done.stderr


def test_only_modules_for_engines_and_extras_need_more_than_the_base(base: Path) -> None:
    failed = dict(line.split() for line in python(base, "-c", IMPORT_ALL, "kvsidecar", "cache_daemon").splitlines())
    others = {name: missing for name, missing in failed.items() if not name.startswith(OF_EXTRAS)}
    assert others == {}
    assert set(failed.values()) <= {*OF_ENGINES, "cryptography", "msgspec", "zmq"}


def test_a_daemon_of_the_base_serves_a_client(base: Path, tmp_path: Path) -> None:
    socket = tmp_path / "cache.sock"
    flags = ("--socket", str(socket), "--store", str(tmp_path / "store"), "--arena-bytes", "16MiB")
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(
            [str(base / "bin" / "kvsidecar"), "daemon", *flags], env=without_paths(), cwd=base, stdout=log, stderr=log
        )
    try:
        wait_for(lambda: socket.exists() or daemon.poll() is not None, 60)
        assert daemon.poll() is None, (tmp_path / "log").read_text()
        assert python(base, "-c", STORES, str(socket)) == "chunks 1\n"
        daemon.terminate()
        assert daemon.wait(90) == 0
    finally:
        daemon.kill()
        daemon.wait()


def test_a_gateway_runs_without_torch(gateway: Path) -> None:
    found = python(gateway, "-c", EXPORTS, "fastapi", *sorted(OF_ENGINES | {"transformers", "llguidance"}))
    assert found.split() == ["fastapi"]
    assert python(gateway, "-c", IMPORT_ALL, "inference_svc.gateway") == ""
    assert command(gateway, "gateway", "--help").returncode == 0
    assert "torch, transformers, llguidance and 5 more" in command(gateway, "serve").stderr


def test_the_extras_are_those_of_the_packaging() -> None:
    for extra, packages in PACKAGES.items():
        names = {canonicalize_name(requirement.name) for requirement in declared(extra)}
        names -= {canonicalize_name(requirement.name) for requirement in declared()}
        assert names == {canonicalize_name(package) for package in packages}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lmcache"])
def test_an_engine_is_left_as_it_is(engine: str) -> None:
    assert declared(engine) == declared()


def test_the_base_brings_neither_torch_nor_a_web_server() -> None:
    assert closure(declared()) & {canonicalize_name(name) for name in WORKER_ONLY} == set()


# Distributions that are imported by another name.
IMPORTED_AS = {
    "googleapis-common-protos": "google.rpc",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "protobuf": "google.protobuf",
    "cuda-bindings": "cuda",
    "obstore": "obstore",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
    "pyzmq": "zmq",
    "valkey-glide": "glide",
}
OURS = {"kvsidecar", "cache_daemon", "inference_svc", "kvkernels"}


def imports(folder: Path) -> Iterator[str]:
    """Return the packages imported anywhere in a folder's modules; for ``google`` with the next part."""
    for path in folder.rglob("*.py"):
        if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                first, *rest = module.split(".")
                yield f"google.{rest[0]}" if first == "google" and rest else first


def imported_name(distribution: str) -> str:
    return IMPORTED_AS.get(distribution, distribution.replace("-", "_"))


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    base = {imported_name(requirement.name) for requirement in declared()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {imported_name(r.name) for extra in project["optional-dependencies"] for r in declared(extra)}
    used = {name for folder in ("clients/python/kvsidecar", "cache_daemon") for name in imports(ROOT / folder)}
    everywhere = used | {n for folder in ("inference_svc", "kernels/kvkernels") for n in imports(ROOT / folder)}
    assert base - used == set()
    assert everywhere - set(sys.stdlib_module_names) - OURS - OF_ENGINES - base - extras == set()
    worker = {imported_name(requirement.name) for requirement in declared("worker")}
    assert worker - everywhere == set()
