"""Build of the CUDA kernels without a GPU, and kernel selection."""

import ctypes
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvkernels import implementations
from kvkernels.chunk_payload import DeviceBytes
from kvkernels.cuda import cuda_build, cuda_sources, kernel_select, nvrtc
from kvkernels.cuda.awq_gemm import _AwqParams
from kvkernels.cuda.cuda_attention import _AttentionParams, _CombineParams
from kvkernels.cuda.cuda_kv_pack import _KvPackParams
from kvkernels.cuda.cuda_library import KernelLaunchError, SharedLibrary
from kvkernels.cuda.imported_memory import checked_address, in_use, register_range, unregister_range
from kvsidecar.cache.v1.cache_pb2 import Welcome
from kvsidecar.kv_transfer import cuda_arena

REPORT = cuda_sources.folder() / "resources.json"
LOG = """\
ptxas info    : Compiling entry function 'combine_f16' for 'sm_80'
ptxas info    : Function properties for combine_f16
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 400 bytes cmem[0]
"""


def test_what_a_kernel_uses_is_read_from_the_compiler() -> None:
    used = {"registers": 40, "spill_bytes": 12, "stack_bytes": 0}
    assert cuda_build.read_resources(LOG) == {"combine_f16": {"sm_80": used}}


def test_growth_is_named() -> None:
    before = {"registers": 40, "spill_bytes": 0, "stack_bytes": 0, "tensor_core_instructions": 9}
    now = {"registers": 60, "spill_bytes": 16, "stack_bytes": 8, "tensor_core_instructions": 0}
    old: cuda_build.Report = {"a": {"sm_80": before}, "gone": {}}
    new: cuda_build.Report = {"a": {"sm_80": now}, "new": {}}
    assert cuda_build.growth(old, new) == [
        "a on sm_80 uses 60 registers, before 40",
        "a on sm_80 has 8 bytes of stack, before 0",
        "a on sm_80 spills 16 bytes, before 0",
        "a on sm_80 uses no tensor cores any more",
        "gone is gone",
    ]
    assert cuda_build.growth(old, old) == []


def test_the_report_covers_every_kernel_and_architecture() -> None:
    report = json.loads(REPORT.read_text())
    assert {f"attention_pool_{t}_{d}" for t in ("f16", "bf16") for d in (64, 96, 128, 256)} <= report.keys()
    wanted = {f"sm_{a}" for a in cuda_build.ARCHITECTURES}
    assert all(wanted == set(by_architecture) for by_architecture in report.values())
    products = [k for k in report if k.startswith(("attention_", "awq_gemm"))]
    for kernel in products:
        for architecture, used in report[kernel].items():
            no_bf16 = architecture == "sm_75" and "bf16" in kernel
            assert (used["tensor_core_instructions"] > 0) != no_bf16, (kernel, architecture)


@pytest.mark.skipif(not kernel_select.LIBRARY.exists(), reason="the library has not been built (make kernels)")
def test_the_library_loads_anywhere_and_knows_its_parameters() -> None:
    library = SharedLibrary(kernel_select.LIBRARY)
    assert library.devices == torch.cuda.device_count() or library.devices < 0
    for name, params in (
        ("attention_few_pool_bf16_256", _AttentionParams),
        ("combine_bf16", _CombineParams),
        ("unpack8_f16", _KvPackParams),
        ("awq_gemm_bf16", _AwqParams),
    ):
        assert library.has(name, params), name
        longer = type("Longer", (ctypes.Structure,), {"_fields_": [("known", params), ("new", ctypes.c_int64)]})
        assert not library.has(name, longer)
    if library.devices < 1:
        with pytest.raises(KernelLaunchError, match="combine_f16 on a grid of"):
            library.launch("combine_f16", (1, 1, 1), 128, 0, _CombineParams(), 0)
        with pytest.raises(KernelLaunchError, match="no such kernel"):
            library.launch("nonsense", (1, 1, 1), 128, 0, _CombineParams(), 0)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not nvrtc.find_compilers(), reason="no NVRTC with CUDA headers (pip install 'kvsidecar[kernels]')")
@pytest.mark.parametrize("architecture", ["sm_70", "sm_90"])
def test_nvrtc_compiles_the_same_sources(architecture: str) -> None:
    try:
        nvrtc.find_compiler(architecture)
    except RuntimeError as error:
        pytest.skip(str(error))
    cubins = nvrtc.compile_kernels(architecture)
    assert all(cubin[:4] == b"\x7fELF" for cubin in cubins)
    for kernel in (b"attention_pool_f16_128", b"combine_bf16", b"awq_gemm_f16", b"unpack8_bf16"):
        assert sum(kernel in cubin for cubin in cubins) >= 1


def test_compiled_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_kernels", lambda architecture: [b"first", architecture.encode()])
    assert nvrtc.cached_cubins("sm_90") == [b"first", b"sm_90"]
    assert "compiling CUDA kernels for sm_90" in capsys.readouterr().err
    monkeypatch.setattr(nvrtc, "compile_kernels", lambda architecture: pytest.fail("compiled twice"))
    assert nvrtc.cached_cubins("sm_90") == [b"first", b"sm_90"]


def test_workers_that_start_at_once_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file lock excludes threads and processes alike, since each opens the file for itself."""
    compiled = list[str]()

    def compile_kernels(architecture: str) -> list[bytes]:
        compiled.append(architecture)
        time.sleep(0.2)
        return [b"code"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_kernels", compile_kernels)
    with ThreadPoolExecutor(3) as workers:
        assert list(workers.map(nvrtc.cached_cubins, ["sm_90"] * 3)) == [[b"code"]] * 3
    assert compiled == ["sm_90"]


NVRTC_DOUBLE = """
int nvrtcGetNumSupportedArchs(int* count) {{ *count = 1; return 0; }}
int nvrtcGetSupportedArchs(int* numbers) {{ *numbers = {number}; return 0; }}
const char* nvrtcGetErrorString(int error) {{ return ""; }}
"""


def wheel(folder: Path, headers: Path, number: int) -> None:
    """Make a folder like that of an NVRTC wheel, whose compiler supports one architecture."""
    (folder / "lib").mkdir(parents=True)
    headers.mkdir(parents=True)
    (headers / "cuda_fp16.h").touch()
    source = folder / "nvrtc.c"
    source.write_text(NVRTC_DOUBLE.format(number=number))
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(folder / "lib" / "libnvrtc.so.1")], check=True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the test doubles with")
def test_the_compiler_that_supports_an_architecture_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 13 sorts first and compiles no sm_70; headers are those of the library's own version."""
    wheel(tmp_path / "cu13", tmp_path / "cu13" / "include", 90)
    wheel(tmp_path / "cuda_nvrtc", tmp_path / "cuda_runtime" / "include", 70)
    monkeypatch.setattr(nvrtc, "nvidia_folders", lambda: sorted(tmp_path.iterdir()))
    assert nvrtc.find_compiler("sm_70").headers == tmp_path / "cuda_runtime" / "include"
    assert nvrtc.find_compiler("sm_90").headers == tmp_path / "cu13" / "include"
    with pytest.raises(RuntimeError, match=r"no NVRTC for sm_50: .*cu13.*cuda_nvrtc.* support others"):
        nvrtc.find_compiler("sm_50")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the test doubles with")
def test_a_compiler_gets_the_builtins_of_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 13's library needs its builtins, and does not search its own folder for them."""
    folder, headers = tmp_path / "cu99" / "lib", tmp_path / "cu99" / "include"
    folder.mkdir(parents=True)
    headers.mkdir()
    (headers / "cuda_fp16.h").touch()
    builtins, source = folder / "libnvrtc-builtins.so.99.0", folder / "nvrtc.c"
    source.write_text(NVRTC_DOUBLE.format(number=90))
    compiler = ["cc", "-shared", "-fPIC"]
    subprocess.run([*compiler, "-xc", "/dev/null", f"-Wl,-soname,{builtins.name}", "-o", str(builtins)], check=True)
    needs = ["-Wl,--no-as-needed", str(builtins), "-o", str(folder / "libnvrtc.so.99")]
    subprocess.run([*compiler, str(source), *needs], check=True)
    monkeypatch.setattr(nvrtc, "nvidia_folders", lambda: [tmp_path / "cu99"])
    assert nvrtc.find_compiler("sm_90").library == folder / "libnvrtc.so.99"


def test_a_build_beside_cuda_13_leaves_out_volta_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(target: Path, architectures: tuple[int, ...]) -> cuda_build.Report:
        target.write_bytes(b"built")
        return {}

    monkeypatch.setattr(nvrtc, "nvidia_folders", list)
    monkeypatch.setattr(cuda_build, "build", build)
    monkeypatch.setattr(sys, "argv", ["make kernels", "--out", str(tmp_path / "libkvkernels.so")])
    assert cuda_build.main() == 0
    assert "left out sm_70: no NVRTC with CUDA headers" in capsys.readouterr().out


def test_only_architectures_of_the_compiler_are_built(tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\nprintf 'sm_75\\nsm_90\\nsm_120\\n'\n")
    compiler.chmod(0o755)
    assert cuda_build.supported_architectures(str(compiler)) == (75, 90)
    compiler.write_text("#!/bin/sh\necho sm_120\n")
    with pytest.raises(RuntimeError, match="compiles for sm_120, and for none of ours"):
        cuda_build.supported_architectures(str(compiler))


def test_every_way_that_fails_says_why() -> None:
    def missing() -> SharedLibrary:
        raise OSError("it has not been built (make kernels)")

    choice = kernel_select.first_working(("fat library", missing), ("compiled by NVRTC", missing))
    assert choice.kernels is None
    assert choice.why.count("it has not been built") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_device_the_table_says_so() -> None:
    assert [(i.op, i.name) for i in implementations() if i.device == "cuda"] == [("all", "none: no CUDA device")]


def test_device_memory_is_used_and_given_up_under_one_lock() -> None:
    part = DeviceBytes(4096 + 64, 32)
    register_range(4096, 4096, lambda offset, size_bytes: memoryview(bytes(size_bytes)))
    with in_use():
        assert checked_address(part) == 4160
    given_up: list[str] = []
    unregister_range(4096, lambda: given_up.append("once"))
    unregister_range(4096, lambda: given_up.append("twice"))
    assert given_up == ["once"]
    with pytest.raises(ValueError, match="its session has ended"), in_use():
        checked_address(part)


def test_a_range_that_two_sessions_imported_lasts_until_both_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA maps memory of one legacy handle once for a process, and counts how often it was opened."""
    memory, closed = SimpleNamespace(address=4096, size_bytes=4096, read=lambda at, size: memoryview(bytes(size))), []
    memory.close = lambda: closed.append(1)
    monkeypatch.setattr(cuda_arena, "device_uuid", lambda device: b"")
    monkeypatch.setattr(cuda_arena, "_imported", lambda welcome, device: memory)
    first, second = (cuda_arena.CudaArena(Welcome(), 0) for _ in range(2))
    first.close()
    first.close()
    with in_use():
        assert checked_address(second.part(64, 32)) == 4160
    second.close()
    assert len(closed) == 2
    with pytest.raises(ValueError, match="its session has ended"), in_use():
        checked_address(second.part(64, 32))
