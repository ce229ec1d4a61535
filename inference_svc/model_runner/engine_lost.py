"""EngineLost: the error that ends an engine after a device failure or hung copy."""

from __future__ import annotations

import torch


class EngineLost(BaseException):
    """Fatal error of an engine; no handler of a request's failure catches it.

    It ends the engine's thread.
    """


def check_device(device: torch.device, error: BaseException) -> None:
    """Raises EngineLost if ``error`` left a CUDA device unusable.

    CUDA errors are sticky: after such an error, every later CUDA call of the process fails.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise EngineLost(f"{device} computes no more: {str(lost).splitlines()[0]}") from error
