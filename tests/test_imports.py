"""Import rules: no module cycle, no long file, no basename twice in a package."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "cache_daemon": ROOT,
    "inference_svc": ROOT,
    "kvsidecar": ROOT / "clients" / "python",
    "kvkernels": ROOT / "kernels",
}
MAX_LINES = 400
# Packages of the inference engine, lowest first, and the packages of inference_svc that each may import.
LAYERS = {
    "kv_pool": set(),
    "structured_output": set(),
    "sampling": {"structured_output"},
    "models": {"kv_pool"},
    "lora": {"models"},
    "model_runner": {"kv_pool", "models", "lora"},
    "context_reuse": {"kv_pool", "models", "lora", "model_runner"},
    "sequence": {"kv_pool", "lora", "model_runner", "context_reuse", "sampling", "structured_output"},
    "spec_decode": {"kv_pool", "model_runner", "sampling", "sequence"},
    "scheduling": {"kv_pool", "model_runner", "context_reuse", "sequence", "spec_decode"},
    "kv_client": {"kv_pool", "model_runner", "context_reuse", "sequence"},
    "engine": {
        *("kv_pool", "models", "lora", "model_runner", "context_reuse"),
        *("sampling", "sequence", "spec_decode", "scheduling"),
    },
}


def files_of(package: str) -> dict[str, Path]:
    """Modules of a package by dotted name, without generated stubs."""
    base = PACKAGES[package]
    paths = [path for path in (base / package).rglob("*.py") if "_pb2" not in path.name]
    return {".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = {name: path for package in PACKAGES for name, path in files_of(package).items()}


def imports_at_load(path: Path) -> set[str]:
    """Modules of ours that importing ``path`` imports; those inside functions come later and do not count."""
    found: set[str] = set()
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        stack += ast.iter_child_nodes(node)
    return found & set(MODULES)


def test_no_module_imports_one_that_imports_it() -> None:
    graph = {name: imports_at_load(path) - {name} for name, path in MODULES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph) > 300


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_longer_than_400_lines(package: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files_of(package).values()}
    assert {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_basename_occurs_twice_in_a_package(package: str) -> None:
    names = Counter(path.name for path in files_of(package).values() if not path.name.startswith("__"))
    assert {name for name, count in names.items() if count > 1} == set()


def test_no_module_is_named_by_a_verb_in_ing() -> None:
    """Some words in -ing are nouns of the field, and are left."""
    nouns = {
        "accounting",
        "chunking",
        "folding",
        "ring",
        "rounding",
        "sampling",
        "scaling",
        "scheduling",
        "staging",
        "streaming",
        "tracing",
        "tuning",
    }
    leaves = {name.rsplit(".", 1)[-1] for name in MODULES}
    assert {leaf for leaf in leaves if leaf.endswith("ing") and leaf.rsplit("_", 1)[-1] not in nouns} == set()


def all_imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, at load or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(MODULES)


def test_the_layers_of_the_engine_import_downwards_only() -> None:
    order = list(LAYERS)
    assert all(order.index(lower) < order.index(name) for name, allowed in LAYERS.items() for lower in allowed)
    wrong = {
        f"{module} imports {imported}"
        for module, path in MODULES.items()
        if module.startswith("inference_svc.") and (package := module.split(".")[1]) in LAYERS
        for imported in all_imports(path)
        if imported.startswith("inference_svc.") and imported.split(".")[1] not in LAYERS[package] | {package}
    }
    assert wrong == set()
