"""Choice of a model's device and dtype."""

from __future__ import annotations

import structlog
import torch
from kvkernels.cpu.cpu_features import native_bfloat16
from kvkernels.device.visible_devices import device_of, has_cuda
from kvsidecar.errors import ConfigurationError

from inference_svc.models.model_check import check_device

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BFLOAT16_SINCE = (8, 0)

log = structlog.get_logger("model")


def pick_device(name: str) -> torch.device:
    """Resolve ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. Raises ConfigurationError."""
    if name == "auto":
        return torch.device("cuda" if has_cuda() else "cpu")
    check_device(name)
    device = torch.device(name)
    if device.type == "cuda" and not has_cuda():
        raise ConfigurationError(f"device is {name!r}, but torch sees no CUDA device; use cpu, or run kvsidecar doctor")
    return device


def pick_dtype(name: str, stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Resolve a dtype; ``auto`` is the checkpoint's dtype.

    On a CPU, 16-bit weights run as bfloat16 if the CPU computes bfloat16 natively, and as float32 if not. A GPU without
    bfloat16 runs float16.
    """
    if name != "auto":
        chosen = getattr(torch, name, None)
        if chosen not in _DTYPES or (device.type == "cpu" and chosen == torch.float16):
            raise ConfigurationError(f"dtype is {name!r}; allowed are auto, float32, bfloat16 and, on CUDA, float16")
        return chosen  # type: ignore[no-any-return]
    wanted = stored if stored in _DTYPES else torch.float32
    if device.type == "cpu" and wanted != torch.float32:
        return torch.bfloat16 if native_bfloat16() else torch.float32
    if (
        wanted == torch.bfloat16
        and device.type == "cuda"
        and (facts := device_of(device).facts).capability < _BFLOAT16_SINCE
    ):
        log.warning(
            "this GPU has no bfloat16, so the model runs in float16; --dtype chooses another", device=facts.name
        )
        return torch.float16
    return wanted
