"""Builds the CPU emulator: the same sources, with every CUDA thread a fiber. For tests; far too slow to serve."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvkernels.cuda import cuda_sources

_FLAGS = ("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-DKVK_EMULATED", "-shared", "-fPIC", "-w")


def compiler() -> str | None:
    """A C++20 compiler, if there is one."""
    return next((found for name in ("g++", "clang++") if (found := shutil.which(name))), None)


def build(root: Path | None = None, volta: bool = False, sanitize: bool = False, fewest: bool = False) -> Path:
    """The emulator's library, built from ``root`` (default: the repository's ``kernels``) unless the same sources were
    built before. ``volta`` takes the code of sm_70, ``sanitize`` adds the address sanitizer, ``fewest`` leaves
    attention for f16 and 64 channels alone. Raises RuntimeError with the compiler's message."""
    found = compiler()
    if found is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++")
    kind = ("-volta" if volta else "") + ("-sanitized" if sanitize else "") + ("-fewest" if fewest else "")
    if root is None:
        cache = Path(tempfile.gettempdir()) / f"kvkernels-{os.getuid()}"
        cache.mkdir(mode=0o700, exist_ok=True)
        target = cache / f"emulator-{cuda_sources.fingerprint('cuda', 'emulator')}{kind}.so"
        if target.exists():
            return target
    else:
        target = root / f"emulator{kind}.so"
    flags = [*_FLAGS, *(["-DKVK_EMULATED_ARCH=700"] if volta else [])]
    flags += ["-DKVK_FEWEST"] if fewest else []
    flags += ["-O1", "-g", "-fsanitize=address"] if sanitize else ["-O2", "-march=native"]
    program = (root or cuda_sources.folder()) / "emulator" / "emulator.cpp"
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".so", delete=False) as unfinished:
        done = subprocess.run([found, *flags, str(program), "-o", unfinished.name], capture_output=True, text=True)
    if done.returncode:
        Path(unfinished.name).unlink()
        raise RuntimeError(f"the emulator does not compile:\n{done.stderr[-4000:]}")
    Path(unfinished.name).replace(target)  # whole or not at all, whoever else builds
    return target
