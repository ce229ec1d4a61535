"""Runtime compilation of the kernels with NVRTC, and launch through the driver API.

Used if there is no fat library. torch bundles NVRTC. NVRTC 12.9 (``nvidia-cuda-nvrtc-cu12==12.9.86`` with the headers
of ``nvidia-cuda-runtime-cu12==12.9.79``) also compiles for sm_70, which CUDA 13 does not support.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvkernels.cuda import cuda_sources
from kvkernels.cuda.cuda_library import KernelLaunchError


def nvidia_folders() -> Iterator[Path]:
    """Yield the folders of NVIDIA's wheels and of an installed toolkit."""
    found = importlib.util.find_spec("nvidia")
    for location in (found.submodule_search_locations or []) if found else []:
        yield from sorted(Path(location).iterdir())
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    yield Path("/usr/local/cuda")


def find_nvrtc() -> tuple[Path, Path] | None:
    """Find NVRTC's library and the folder of CUDA's headers; None unless both exist."""
    folders = [f for f in nvidia_folders() if f.is_dir()]
    libraries = [p for f in folders for part in ("lib", "lib64") for p in sorted(f.glob(f"{part}/libnvrtc.so.*"))]
    headers = [f / "include" for f in folders if (f / "include" / "cuda_fp16.h").exists()]
    libraries = [p for p in libraries if "alt" not in p.name]
    return (libraries[0], headers[0]) if libraries and headers else None


def compile_kernels(architecture: str) -> bytes:
    """Compile all kernels to a cubin for ``sm_XX``. Raises RuntimeError with the compiler's message."""
    found = find_nvrtc()
    if found is None:
        raise RuntimeError(
            "no NVRTC with CUDA headers: pip install nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79"
        )
    library, headers = found
    c = ctypes.CDLL(str(library))
    c.nvrtcGetErrorString.restype = ctypes.c_char_p
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = "".join(f'#include "{name}"\n' for name in cuda_sources.KERNELS)
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        f"-I{cuda_sources.folder() / 'cuda'}",
        f"-I{headers}",
    ]

    def check(result: int) -> None:
        if result:
            raise RuntimeError(f"NVRTC: {c.nvrtcGetErrorString(result).decode()}")

    check(c.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kvkernels.cu", 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        failed = c.nvrtcCompileProgram(program, len(options), arguments)
        if failed:
            check(c.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            check(c.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC does not compile the kernels for {architecture}:\n{log.value.decode()[:4000]}")
        check(c.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        check(c.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        c.nvrtcDestroyProgram(ctypes.byref(program))


def cached_cubin(architecture: str) -> bytes:
    """Return ``compile_kernels``' cubin from the user's cache folder.

    Compiles it at first use, which takes a minute.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvsidecar" / "kernels"
    path = root / f"{cuda_sources.fingerprint('cuda')}-{architecture}.cubin"
    if path.exists():
        return path.read_bytes()
    print(f"compiling CUDA kernels for {architecture}, once (a minute) ...", file=sys.stderr, flush=True)
    cubin = compile_kernels(architecture)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=root, delete=False) as unfinished:
        unfinished.write(cubin)
    Path(unfinished.name).replace(path)
    return cubin


class CubinModule:
    """Kernels of a cubin on the current device, through the driver API.

    Raises OSError without a driver, KernelLaunchError if the driver rejects the code.
    """

    def __init__(self, cubin: bytes) -> None:
        self._c = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._check("the kernels", self._c.cuModuleLoadData(ctypes.byref(self._module), cubin))

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        found = ctypes.c_void_p()
        return int(self._c.cuModuleGetFunction(ctypes.byref(found), self._module, name.encode())) == 0

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        function = self._functions.get(name)
        if function is None:
            function = ctypes.c_void_p()
            self._check(name, self._c.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
            if shared_bytes > 48 * 1024:
                self._check(name, self._c.cuFuncSetAttribute(function, 8, shared_bytes))  # max dynamic shared memory
            self._functions[name] = function
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._check(
            f"{name} on a grid of {tuple(grid)}",
            self._c.cuLaunchKernel(
                function, *grid, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream), arguments, None
            ),
        )

    def _check(self, what: str, error: int) -> None:
        if error:
            text = ctypes.c_char_p()
            self._c.cuGetErrorString(error, ctypes.byref(text))
            raise KernelLaunchError(f"{what}: {(text.value or b'error').decode()} (CUDA driver, {error})")
