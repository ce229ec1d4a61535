"""Out-of-bounds accesses of kernels: the suite's shapes under the address sanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvkernels.cuda import emulator

from tests.kvkernels.emulated.conftest import plant


def runtime() -> str | None:
    """Return the sanitizer's shared library, which must be loaded before Python."""
    if not (gxx := shutil.which("g++")):
        return None
    found = subprocess.run([gxx, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


pytestmark = [
    pytest.mark.skipif(runtime() is None, reason="no g++ with an address sanitizer"),
    pytest.mark.timeout(600),  # the sanitizer takes minutes
]


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(runtime()),
        # Fibers change stacks behind the sanitizer's back, and Python frees nothing at exit.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=1",
    }
    command = [sys.executable, "-m", "tests.kvkernels.emulated.sanitized", str(library), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=550)


def test_kernels_stay_inside_their_memory() -> None:
    done = run(emulator.build(sanitize=True))
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_read_out_of_bounds_is_named(tmp_path: Path) -> None:
    plant(
        tmp_path, "attention.cu", "const bool valid = m < packed;", "const bool valid = true;", kernels="attention.cu"
    )
    done = run(emulator.build(tmp_path, sanitize=True, fewest=True), "--few")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
