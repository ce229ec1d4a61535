"""What ends an engine: nothing more can be computed, or waited for."""

from __future__ import annotations

import torch


class EngineLost(BaseException):
    """Leaves the engine's loop, through everything that handles the failures of single requests."""


def check_device(device: torch.device, error: BaseException) -> None:
    """Raises EngineLost when ``error`` left a CUDA device unusable: such errors are sticky, and every later call of the
    process fails as well."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise EngineLost(f"{device} computes no more: {str(lost).splitlines()[0]}") from error
