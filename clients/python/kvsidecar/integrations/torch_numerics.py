"""Identity of the numerics of an engine that computes with PyTorch.

The identity must change if two engines may compute different bits. It does not test the engine's own kernels: the
device's name represents them here, and the caller adds the engine's version. So two machines with different device
names share no chunks, even if they compute equal bits.
"""

from __future__ import annotations

import hashlib
import platform

import torch
from kvkernels.device.visible_devices import device_of
from torch import Tensor

SHARED = "any machine"
_WIDTH, _ROWS = 1024, (4, 64)
_ID_DIGITS = 16


def torch_numerics(device: torch.device, dtype: torch.dtype, shared: bool) -> str:
    """Return the id of the machine's numerics for a namespace's ``producer``.

    With ``shared``, the id is the same on every machine, for users to whom hits matter more than equal bits. Without
    ``shared``, the function runs a few matrix products on the device, which takes a few milliseconds.
    """
    if shared:
        return SHARED
    digest = hashlib.sha256(repr(_named(device)).encode())
    for kind in dict.fromkeys((dtype, torch.float32)):
        weight = _values(_WIDTH, _WIDTH).to(device, kind)
        for rows in _ROWS:
            out = torch.nn.functional.linear(_values(rows, _WIDTH).to(device, kind), weight)
            for result in (out, torch.softmax(out, -1), torch.rsqrt(out.float().square().mean(-1))):
                digest.update(result.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:_ID_DIGITS]


def _named(device: torch.device) -> list[object]:
    if device.type == "cuda":
        facts = device_of(device).facts
        return [facts.name, facts.capability, torch.version.cuda]
    # Kernels also select their code by these instructions; torch's CPU capability does not contain them.
    has = [bool(getattr(torch.cpu, name, bool)()) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return [device.type, platform.machine(), torch.backends.cpu.get_cpu_capability(), *has]


def _values(rows: int, columns: int) -> Tensor:
    """Return pseudorandom numbers between -2 and 2, which are the same on every machine."""
    mixed = torch.arange(1, rows * columns + 1) * 2_654_435_761 % (1 << 16) - (1 << 15)
    return (mixed.float() / (1 << 14)).view(rows, columns)
