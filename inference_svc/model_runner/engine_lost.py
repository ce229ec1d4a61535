"""EngineLost: the error that ends an engine, because its device or a copy no longer works."""

from __future__ import annotations

import torch


class EngineLost(BaseException):
    """Fatal error: passes every handler of single requests' failures and ends the engine's thread."""


def check_device(device: torch.device, error: BaseException) -> None:
    """Raises EngineLost when ``error`` left a CUDA device unusable: such errors are sticky, and every later call of the
    process fails as well."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise EngineLost(f"{device} computes no more: {str(lost).splitlines()[0]}") from error
