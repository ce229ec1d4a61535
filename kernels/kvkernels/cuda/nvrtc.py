"""Runtime compilation of the kernels with NVRTC.

Used if there is no fat library. torch bundles NVRTC. NVRTC 12.9 (``nvidia-cuda-nvrtc-cu12==12.9.86`` with the headers
of ``nvidia-cuda-runtime-cu12==12.9.79``) also compiles for sm_70, which CUDA 13 does not support.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kvsidecar.process.cpus import usable_cpus

from kvkernels.cuda import cuda_sources

INSTALL = "pip install nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79"


def nvidia_folders() -> Iterator[Path]:
    """Yield the folders of NVIDIA's wheels and of an installed toolkit."""
    found = importlib.util.find_spec("nvidia")
    for location in (found.submodule_search_locations or []) if found else []:
        yield from sorted(Path(location).iterdir())
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    yield Path("/usr/local/cuda")


class Compiler:
    """One NVRTC library and the headers of its version. Raises OSError if it does not load."""

    def __init__(self, library: Path, headers: Path) -> None:
        self.library, self.headers = library, headers
        for builtins in sorted(library.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))  # the library itself does not look in its own folder
        self._c = ctypes.CDLL(str(library))
        self._c.nvrtcGetErrorString.restype = ctypes.c_char_p

    def architectures(self) -> tuple[str, ...]:
        """Return the architectures that it compiles for, such as ``sm_90``."""
        count = ctypes.c_int()
        self._check(self._c.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._c.nvrtcGetSupportedArchs(numbers))
        return tuple(f"sm_{number}" for number in numbers)

    def compile(self, text: str, architecture: str) -> bytes:
        """Compile a program to a cubin. Raises RuntimeError with the compiler's message. Releases the GIL."""
        program, size, c = ctypes.c_void_p(), ctypes.c_size_t(), self._c
        options = [
            f"--gpu-architecture={architecture}",
            "--std=c++17",
            f"-I{cuda_sources.folder() / 'cuda'}",
            f"-I{self.headers}",
        ]
        self._check(c.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kvkernels.cu", 0, None, None))
        try:
            arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            if c.nvrtcCompileProgram(program, len(options), arguments):
                self._check(c.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
                log = ctypes.create_string_buffer(size.value)
                self._check(c.nvrtcGetProgramLog(program, log))
                message = log.value.decode()[:4000]
                raise RuntimeError(f"NVRTC does not compile the kernels for {architecture}:\n{message}")
            self._check(c.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            cubin = ctypes.create_string_buffer(size.value)
            self._check(c.nvrtcGetCUBIN(program, cubin))
            return cubin.raw
        finally:
            c.nvrtcDestroyProgram(ctypes.byref(program))

    def _check(self, result: int) -> None:
        if result:
            raise RuntimeError(f"NVRTC: {self._c.nvrtcGetErrorString(result).decode()}")


def find_compilers() -> list[Compiler]:
    """Find all NVRTC libraries that have headers: in their own folder, or in the wheel of the same CUDA."""
    found = []
    for folder in nvidia_folders():
        headers = next(
            (h for h in (folder / "include", folder.parent / "cuda_runtime" / "include") if _are_headers(h)), None
        )
        for part in ("lib", "lib64"):
            libraries = [p for p in sorted(folder.glob(f"{part}/libnvrtc.so.*")) if "alt" not in p.name]
            if libraries and headers is not None:
                try:
                    found.append(Compiler(libraries[0], headers))
                except OSError as error:
                    print(f"{libraries[0]} does not load: {error}", file=sys.stderr)
    return found


def _are_headers(folder: Path) -> bool:
    return (folder / "cuda_fp16.h").exists()


def find_compiler(architecture: str) -> Compiler:
    """Find an NVRTC that compiles for an architecture. Raises RuntimeError."""
    compilers = find_compilers()
    for compiler in compilers:
        if architecture in compiler.architectures():
            return compiler
    if not compilers:
        raise RuntimeError(f"no NVRTC with CUDA headers: {INSTALL}")
    names = ", ".join(str(compiler.library) for compiler in compilers)
    raise RuntimeError(f"no NVRTC for {architecture}: {names} support others; {INSTALL}")


def compile_kernels(architecture: str) -> list[bytes]:
    """Compile all kernels to cubins for ``sm_XX``, in parallel. Raises RuntimeError with the compiler's message."""
    compiler = find_compiler(architecture)
    with ThreadPoolExecutor(usable_cpus()) as pool:
        return list(pool.map(lambda text: compiler.compile(text, architecture), cuda_sources.programs()))


def cached_cubins(architecture: str) -> list[bytes]:
    """Return ``compile_kernels``' cubins from the user's cache folder.

    Compiles them at first use, which takes a minute; other processes wait for it.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvsidecar" / "kernels"
    root.mkdir(parents=True, exist_ok=True)
    name = f"{cuda_sources.fingerprint('cuda')}-{architecture}"
    with locked(root / f"{name}.lock"):
        if not (root / f"{name}.complete").exists():
            print(f"compiling CUDA kernels for {architecture}, once (a minute) ...", file=sys.stderr, flush=True)
            for i, cubin in enumerate(compile_kernels(architecture)):
                with tempfile.NamedTemporaryFile(dir=root, delete=False) as unfinished:
                    unfinished.write(cubin)
                Path(unfinished.name).replace(root / f"{name}-{i:02}.cubin")
            (root / f"{name}.complete").touch()
        return [path.read_bytes() for path in sorted(root.glob(f"{name}-*.cubin"))]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclude other processes. A process that ends frees its lock."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
