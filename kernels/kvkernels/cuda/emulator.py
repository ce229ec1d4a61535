"""Build of the CUDA emulator, which runs the kernels' sources on the CPU.

It runs each CUDA thread as a fiber. For tests only; it is far too slow to serve.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvkernels.cuda import cuda_sources

_FLAGS = ("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-DKVK_EMULATED", "-shared", "-fPIC", "-w")


def compiler() -> str | None:
    """Return a C++20 compiler, or None."""
    return next((found for name in ("g++", "clang++") if (found := shutil.which(name))), None)


def build(root: Path | None = None, volta: bool = False, sanitize: bool = False, fewest: bool = False) -> Path:
    """Build the emulator's library from ``root``, cached by source fingerprint.

    ``root`` is the repository's ``kernels`` by default. ``volta`` selects the code of sm_70, ``sanitize`` adds the
    address sanitizer, ``fewest`` restricts attention to f16 with 64 channels. Raises RuntimeError with the compiler's
    message.
    """
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
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        compiled, linked = Path(work) / "emulator.o", Path(work) / "emulator.so"
        # Linked without -fsanitize=alignment: the emulator itself handles misaligned accesses.
        for command in (
            [*flags, "-fsanitize=alignment", "-c", str(program), "-o", str(compiled)],
            [*flags, str(compiled), "-o", str(linked)],
        ):
            done = subprocess.run([found, *command], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the emulator does not compile:\n{done.stderr[-4000:]}")
        linked.replace(target)  # atomic, even if another process builds
    return target
