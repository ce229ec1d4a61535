"""Build of the CPU kernels: fallbacks, messages, and correctness on other architectures."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kvkernels.cpu import cpu_attention, cpu_build, cpu_library, kv_pack

# Plain loops beside every kernel, without Python.
_CHECK = Path(__file__).with_name("cpu_kernels.cpp")
_FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-w")


def compile_check(command: Sequence[str], folder: Path, *flags: str) -> Path:
    """Compile the check and the kernels to one program, in parallel."""
    sources, program = cpu_build.sources(), folder / "check"
    objects = [str(folder / f"{name}.o") for name in ("check", *cpu_build.KERNELS)]

    def run(*arguments: str) -> None:
        done = subprocess.run([*command, *_FLAGS, *flags, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    paths = [_CHECK, *(sources / name for name in cpu_build.KERNELS)]
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run, "-I", str(sources), "-c", str(p), "-o", o) for p, o in zip(paths, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    run(*objects, "-o", str(program))
    return program


def run_check(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.mark.timeout(600)  # the sanitizer takes minutes
def test_no_kernel_touches_memory_that_is_not_its_own(tmp_path: Path) -> None:
    """Includes the bfloat16 pairs of CPUs with such units, emulated."""
    if not (gxx := shutil.which("g++")) or not cpu_library.usable_variants():
        pytest.skip("no g++, or a CPU without a variant of the kernels")
    variant = cpu_build.variants()[cpu_library.usable_variants()[0]]
    # Without optimization, the sanitizers see every access of the sources, and the compiler takes a third of the time.
    flags = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DKVK_EMULATE_PAIRS")
    program = str(compile_check([gxx], tmp_path, *flags, *variant))
    done = run_check(program)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    planted = run_check(program, "short")
    assert planted.returncode != 0
    assert "AddressSanitizer" in planted.stderr
    assert "update_max_probs" in planted.stderr, "the kernel, not the check"


def cross_compiler(architecture: str) -> list[str] | None:
    """Return a compiler for another architecture: GNU's, or ziglang."""
    if found := shutil.which(f"{architecture}-linux-gnu-g++"):
        return [found, "-static"]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", "-nostdlib++", "-target", f"{architecture}-linux-musl"]
    return None


@pytest.mark.parametrize(("architecture", "variant"), [("aarch64", "neon"), ("aarch64", "neondot"), ("x86_64", "avx2")])
def test_another_architecture_agrees(architecture: str, variant: str, tmp_path: Path) -> None:
    if cpu_build.architecture() == architecture:
        pytest.skip(f"this machine is {platform.machine()}: the other tests run {variant}")
    command, emulator = cross_compiler(architecture), shutil.which(f"qemu-{architecture}")
    if command is None or emulator is None:
        pytest.skip(f"no {architecture}-linux-gnu-g++ (or ziglang), or no qemu-{architecture} (qemu-user)")
    program = compile_check(command, tmp_path, "-O1", *cpu_build.VARIANTS[architecture][variant])
    done = run_check(emulator, *(["-cpu", "max"] if architecture == "x86_64" else []), str(program))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_a_named_compiler_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CC", "false")
    assert cpu_build.compiler() is None
    assert not cpu_build.needs_ziglang(), "whoever says false wants none"
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cpu_build.compiler() is None
    assert cpu_build.needs_ziglang()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert cpu_build.compiler() == [sys.executable, "-m", "ziglang", "c++", "-nostdlib++", "-mcpu=baseline"]


def test_without_a_compiler_torch_serves_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="install g"):
        cpu_build.build(tmp_path / "lib")
    monkeypatch.setattr(cpu_build, "LIBRARIES", tmp_path / "lib")
    none = cpu_library.loaded_library.__wrapped__()
    assert none.library is None
    assert none.why == "the CPU kernels were not compiled when kvsidecar was installed"
    assert "pip install ziglang" in none.advice
    for module in (cpu_attention, kv_pack):
        monkeypatch.setattr(module, "loaded_library", lambda: none)
        assert none.why in module.describe()
    assert not cpu_attention.serves(torch.float32, 64)
    assert not kv_pack.serves(torch.zeros(1, 1, 32, 64))


def test_older_kernels_than_their_sources_do_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / cpu_build.STAMP).write_text("of other sources")
    monkeypatch.setattr(cpu_build, "LIBRARIES", tmp_path)
    assert cpu_library.loaded_library.__wrapped__().why == "the CPU kernels are older than their sources"


def test_a_compilers_message_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_build.compiler() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(cpu_build, "sources", lambda: tmp_path)
    (tmp_path / "broken.cpp").write_text("int x = ;")
    command = cpu_build.compiler()
    assert command is not None
    with pytest.raises(RuntimeError, match=r"does not compile the CPU kernels:[\s\S]*broken.cpp"):
        cpu_build.compile_library(command, tmp_path / "broken.so", ("broken.cpp",), ())
    assert not (tmp_path / "broken.so").exists()
