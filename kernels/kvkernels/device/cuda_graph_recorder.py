"""Recorder of CUDA graphs, and the check of steps that are to be recorded."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvkernels.device.device_port import Step


class _GraphMemory:
    """Handle of a memory pool for graphs, owned by the graphs that use it.

    torch frees a pool with its last graph, and refuses the handle from then on.
    """

    def __init__(self, handle: tuple[int, int]) -> None:
        self.handle = handle


class CudaGraphRecorder:
    """Records CUDA graphs. All share one memory pool, so only one may be replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda
        self._device = device
        self._memory: Callable[[], _GraphMemory | None] = lambda: None
        self._lock = threading.Lock()  # two threads cannot record on one stream

    @cached_property
    def _stream(self) -> Any:
        """Create the stream of all recordings.

        torch hands out 32 streams of a device in turn, so the stream of a later recording would be another thread's.
        That thread's copies would then invalidate the capture, or become part of it.
        """
        return self._cuda.Stream()

    def record(self, step: Step) -> Step:
        cuda = self._cuda
        with self._lock, cuda.device(self._device):
            stream, graph = self._stream, cuda.CUDAGraph()
            before = cuda.current_stream()
            stream.wait_stream(before)
            # torch.cuda.graph is not used, because it leaves its stream only after a successful capture.
            with cuda.stream(stream):
                # A first run: libraries choose their kernels, and a step that cannot be captured is refused here.
                with CaptureCheck(cuda.get_device_capability(self._device)):
                    step()
                stream.synchronize()
                cuda.empty_cache()  # a capture cannot use memory that torch keeps, nor free it
                memory = self._memory() or _GraphMemory(cuda.graph_pool_handle())
                out = self._captured(graph, memory, step)
                self._memory = weakref.ref(memory)
            before.wait_stream(stream)

        def replay(_: _GraphMemory = memory) -> Tensor:
            graph.replay()
            return out

        return replay

    def _captured(self, graph: Any, memory: _GraphMemory, step: Step) -> Tensor:
        """Capture a step on the current stream. Other threads copy meanwhile, so only this thread is checked."""
        graph.capture_begin(pool=memory.handle, capture_error_mode="thread_local")
        try:
            out = step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is invalid; the step's error says why
                graph.capture_end()
            self._end_allocation(memory)
            raise
        try:
            graph.capture_end()
        except RuntimeError:
            self._end_allocation(memory)
            raise
        return out

    def _end_allocation(self, memory: _GraphMemory) -> None:
        """Take the allocator out of the graphs' pool, where a failed capture leaves it."""
        end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # the capture had ended it
                end(self._device.index or 0, memory.handle)
        self._memory = lambda: None


class CaptureCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that wait for the device, which a CUDA graph cannot contain."""

    _WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capability = capability

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation. Raises RuntimeError for one that cannot be captured."""
        name = func._schema.name.removeprefix("aten::")
        # torch's grouped product reads its groups on the host, except in its kernels for sm_90 and sm_100.
        grouped = name == "_grouped_mm" and self._capability[0] not in (9, 10)
        if name in self._WAITING or grouped:
            raise RuntimeError(f"{func} waits for the device, so a graph cannot contain it")
        if name == "_to_copy" and (kwargs or {}).get("device") == torch.device("cpu") and args[0].device.type != "cpu":
            raise RuntimeError(f"{func} copies to the host, so a graph cannot contain it")
        return func(*args, **(kwargs or {}))
