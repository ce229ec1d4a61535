"""EngineLost: the error that ends an engine after a device failure or hung copy."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch
from kvkernels.device.visible_devices import device_of, is_device
from kvsidecar.errors import first_line

# Limit of the wait for a device that may hang. A step's enqueued work takes less time.
_MAX_CHECK_SECONDS = 30.0


class EngineLost(BaseException):
    """Fatal error that ends the engine's thread.

    It is a BaseException, so that no handler of a request's failure catches it.
    """


def check_device(device: torch.device, error: BaseException) -> None:
    """Raises EngineLost if ``error`` left a device unusable.

    CUDA errors are sticky: after such an error, every later CUDA call of the process fails, or hangs.
    """
    if not is_device(device):
        return
    checked: Future[None] = Future()
    threading.Thread(target=_synchronize, args=(device, checked), name="device-check", daemon=True).start()
    try:
        checked.result(_MAX_CHECK_SECONDS)
    except TimeoutError:
        raise EngineLost(f"{device} computes no more: it has not answered for {_MAX_CHECK_SECONDS:.0f} s") from error
    except Exception as lost:
        raise EngineLost(f"{device} computes no more: {first_line(lost)}") from error


def _synchronize(device: torch.device, checked: Future[None]) -> None:
    try:
        device_of(device).synchronize()
        checked.set_result(None)
    except BaseException as error:
        checked.set_exception(error)
