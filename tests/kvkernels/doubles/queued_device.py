"""A device whose work is queued and done late, with pinned memory that only a device writes."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from kvkernels.cuda.cuda_library import Kernels
from torch import Tensor

from tests.kvkernels.doubles.fake_driver import compiled


class PinnedRange:
    """Pages that are pinned as ``cudaHostAlloc`` and ``cudaHostRegister`` pin them."""

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


class QueuedDevice:
    """Copy engine and kernels of a stream. Work is done at the latest moment: at a wait.

    Device memory is host memory that holds 0xaa until something is copied there.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._queue, self._ranges = kernels, list[Callable[[], object]](), dict[int, PinnedRange]()
        self.payloads: list[int] = []  # addresses that kernels were given
        self.launched: list[str] = []
        self.scratch_ranges: list[tuple[int, int]] = []

    @property
    def pending(self) -> int:
        """Number of copies and kernels that were not done yet."""
        return len(self._queue)

    def close(self) -> None:
        for pinned in self._ranges.values():
            pinned.release()

    # ---- copy engine ----

    def pinned(self, size_bytes: int) -> Tensor:
        view = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        self._ranges[view.ctypes.data] = PinnedRange(view.ctypes.data, size_bytes)
        return torch.from_numpy(view)

    def scratch(self, size_bytes: int) -> Tensor:
        memory = torch.full((size_bytes,), 0xAA, dtype=torch.uint8)
        self.scratch_ranges.append((memory.data_ptr(), memory.data_ptr() + size_bytes))
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._queue.append(lambda: self._copied(target, source))

    @contextmanager
    def ordered(self) -> Iterator[None]:
        yield

    def mark(self) -> Callable[[], None]:
        return self.synchronize

    def synchronize(self) -> None:
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def _copied(self, target: Tensor, source: Tensor) -> None:
        if (pinned := self._holding(target)) is not None:
            pinned.write(target.data_ptr(), memoryview(source.numpy()))
        else:
            holding = self._holding(source)
            assert holding is not None, "the device read memory that is not pinned"
            target.copy_(torch.frombuffer(bytearray(holding.read(source.data_ptr(), len(source))), dtype=torch.uint8))

    def _holding(self, part: Tensor) -> PinnedRange | None:
        storage = part.untyped_storage().data_ptr()
        return self._ranges.get(storage)

    # ---- kernels ----

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        held = type(params).from_buffer_copy(params)
        self.payloads.append(getattr(held, "payload", 0))
        self.launched.append(name)
        self._queue.append(lambda: self._kernels.launch(name, grid, threads, shared_bytes, held, stream))

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        return self._kernels.has(name, params)
