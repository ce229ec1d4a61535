"""Pages that only a device writes; io_uring pins them as CUDA would."""

from __future__ import annotations

import ctypes
import os
import tempfile

import pytest

from tests.kvkernels.doubles.fake_driver import compiled


class PinnedRange:
    """Pages that are pinned, as after ``cudaHostAlloc`` or ``cudaHostRegister``."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self._c, self._pin = compiled("pinned_memory"), ctypes.c_void_p()
        self._c.pin_copy.restype = ctypes.c_long
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in release()
        error = self._c.pin_range(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.byref(self._pin))
        if error:
            pytest.skip(f"the kernel pins no memory for io_uring: {os.strerror(error)}")

    def write(self, address: int, data: memoryview) -> None:
        """Write to the pinned pages as a device does."""
        os.pwrite(self._file.fileno(), data, 0)
        self._copy(address, len(data), to_memory=True)

    def read(self, address: int, size_bytes: int) -> bytes:
        """Read the pinned pages as a device does."""
        self._copy(address, size_bytes, to_memory=False)
        return os.pread(self._file.fileno(), size_bytes, 0)

    def _copy(self, address: int, size_bytes: int, to_memory: bool) -> None:
        place, size = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)
        done = self._c.pin_copy(self._pin, place, self._file.fileno(), size, int(to_memory))
        assert done == size_bytes, f"io_uring copied {done} of {size_bytes} bytes"

    def release(self) -> None:
        self._c.pin_release(self._pin)
        self._file.close()
