"""Copy engine: a device's pinned memory, scratch memory, and asynchronous copies between both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class CopyEngine(Protocol):
    """Copies in the order of one stream. Kernels launched within ``ordered`` run in that order, too."""

    def pinned(self, size_bytes: int) -> Tensor:
        """Allocate page-locked memory of this process that no other process shares or can replace."""
        ...

    def scratch(self, size_bytes: int) -> Tensor:
        """Allocate device memory."""
        ...

    def ordered(self) -> AbstractContextManager[None]:
        """Run the block's copies and kernels after the device's work enqueued so far."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy between pinned memory and device memory."""
        ...

    def mark(self) -> Callable[[], object]:
        """Return a function that waits for the work enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Wait for all enqueued work."""
        ...


class CudaCopyEngine:
    """Copy engine of a CUDA device, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda
        self._device, self._stream = device, self._cuda.Stream(device)

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def scratch(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        cuda = self._cuda
        with cuda.device(self._device):
            self._stream.wait_stream(cuda.default_stream(self._device))  # the engine's
            self._stream.wait_stream(cuda.current_stream(self._device))  # another engine's copies
            with cuda.stream(self._stream):
                yield

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], object]:
        event = self._cuda.Event()
        event.record(self._stream)
        wait: Callable[[], object] = event.synchronize
        return wait

    def synchronize(self) -> None:
        self._stream.synchronize()
