"""Rank group: the collectives of a tensor-parallel worker, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kvsidecar.errors import Unavailable
from torch import Tensor
from torch._C._distributed_c10d import FileStore


class RankGroup:
    """Process group of all ranks of one worker: gloo on CPUs, NCCL on GPUs.

    All ranks must call the same methods with tensors of the same shapes, in the same order. The bits of a result depend
    neither on timing nor on the number of rows: partial sums are added in the order of the ranks.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Path, timeout_seconds: float) -> None:
        """Waits until all ranks have joined. ``store`` is a file that only these ranks use.

        Raises Unavailable after ``timeout_seconds``. Every later collective raises Unavailable after that time, too, or
        as soon as a rank ends.
        """
        self.rank, self.size, self.device = rank, size, device
        timeout = timedelta(seconds=timeout_seconds)
        try:
            files = FileStore(str(store), size)
            files.set_timeout(timeout)
            connect = _nccl if device.type == "cuda" else _gloo
            self._group = connect(files, rank, size, timeout)
        except RuntimeError as error:
            raise Unavailable(
                f"the {size} ranks of this worker did not come together "
                f"(each waits at most {timeout_seconds:g} s): {error}"
            ) from error

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum of all ranks' ``partial``, in the dtype of ``partial``. Adds 16-bit parts in float32."""
        parts = self._gathered(partial)
        total = parts[0].float() + parts[1]
        for part in parts[2:]:
            total += part
        return total.to(partial.dtype)

    def gather_columns(self, part: Tensor, widths: list[int]) -> Tensor:
        """Returns ``[rows, sum(widths)]`` from each rank's ``part [rows, widths[rank]]`` on rank 0.

        The other ranks get their own part back.
        """
        widest = max(widths)
        padded = part if part.shape[1] == widest else torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else []
        self._run(lambda: self._group.gather([parts] if parts else [], [padded.contiguous()], dist.GatherOptions()))
        if self.rank:
            return part
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], 1)

    def _gathered(self, part: Tensor) -> Tensor:
        """Returns ``[ranks, *part.shape]``."""
        out = part.new_empty(self.size * part.numel())
        self._run(lambda: self._group._allgather_base(out, part.reshape(-1)))
        return out.view(self.size, *part.shape)

    def _run(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise Unavailable(f"rank {self.rank} of {self.size} does not get the others' part: {error}") from error


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Process group over the loopback interface: all ranks are on this machine."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
