"""The fake CUDA driver: a ``libcuda.so.1`` for this process."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.kvkernels.doubles.card import H100


@cache
def shared_object(source: Path, soname: str = "") -> Path:
    """Compile a C file to a shared object. Skips the test if there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the test doubles with")
    folder = tempfile.mkdtemp(prefix="kvsidecar-double-")
    atexit.register(shutil.rmtree, folder)
    target = Path(folder) / f"{soname or source.stem}.so"
    flags = ["-shared", "-fPIC", "-O1", "-w", *([f"-Wl,-soname,{soname}"] if soname else [])]
    subprocess.run([compiler, *flags, str(source), "-o", str(target), "-ldl", "-lpthread"], check=True)
    return target


@cache
def compiled(name: str, soname: str = "") -> ctypes.CDLL:
    """Compile and load ``name.c`` beside this file. With a soname, later loads of this name get the same library."""
    return ctypes.CDLL(str(shared_object(Path(__file__).with_name(f"{name}.c"), soname)))


class _Hint(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size_bytes", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("device", ctypes.c_int),
    )


class FakeDriver:
    """Controls the fake driver. It stays loaded, without devices, after ``close``."""

    @classmethod
    def for_test(cls, devices: int = 1) -> FakeDriver:
        """Create the driver for a test. Skips the test if this process may have loaded a real driver."""
        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
        return cls(devices)

    def __init__(self, devices: int = 1, shared_bytes: int = H100.shared_bytes) -> None:
        self._c = compiled("fake_driver", "libcuda.so.1")
        self.reset(devices, shared_bytes)

    def reset(self, devices: int, shared_bytes: int) -> None:
        """Reset all state, and set the number of devices."""
        self._c.fake_reset(devices, shared_bytes)

    def revive(self, ordinal: int = 0) -> None:
        """Undo ``kill``, as a new process would."""
        self._c.fake_revive(ordinal)

    def kill(self, ordinal: int = 0) -> None:
        """Make every later call on a device fail with error 700."""
        self._c.fake_kill(ordinal)

    def run_kernels_with(self, launcher: object) -> None:
        """Let the emulator's function ``kvk_launch`` run launched kernels."""
        self._c.fake_kernels(ctypes.cast(launcher, ctypes.c_void_p))  # type: ignore[arg-type]

    def lack_managed_memory(self) -> None:
        """Report that a device cannot use managed memory on the host."""
        self._c.fake_unmanaged()

    @property
    def hints(self) -> list[tuple[int, int, int, int]]:
        """Hints about managed memory: address, size, kind (0: a prefetch), device (-1: the host)."""
        found = (_Hint * 64)()
        return [(h.address, h.size_bytes, h.kind, h.device) for h in found[: self._c.fake_hints(found)]]

    @property
    def refused(self) -> int:
        """Number of calls from threads without a current context."""
        return int(self._c.fake_refused())

    @property
    def launches(self) -> int:
        return int(self._c.fake_launches())

    @property
    def current(self) -> int:
        """Ordinal of the device of this thread's context; -1 without a context."""
        return int(self._c.fake_current())

    def close(self) -> None:
        self.reset(0, 0)
