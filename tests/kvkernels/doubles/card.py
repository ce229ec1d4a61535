"""Resources that a thread block may use, by GPU (CUDA C++ Programming Guide, compute capabilities)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvkernels.cuda import cuda_sources
from kvkernels.cuda.cuda_library import KernelLaunchError

_REGISTERS_PER_BLOCK, _REGISTERS_PER_WARP_UNIT, _WARP = 65_536, 256, 32


@cache
def _resources() -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, Any] = json.loads((cuda_sources.folder() / "resources.json").read_text())
    return found


@dataclass(frozen=True)
class Card:
    """A GPU's architecture, and the maximum shared memory of a block (opt-in)."""

    name: str
    architecture: str
    shared_bytes: int

    def check_registers(self, kernel: str, threads: int) -> None:
        """Raise KernelLaunchError if a block needs more registers than the card has.

        The compiler's report does not cover sm_70.
        """
        used = _resources().get(kernel, {}).get(self.architecture)
        if used is None:
            return
        of_warp = -(-used["registers"] * _WARP // _REGISTERS_PER_WARP_UNIT) * _REGISTERS_PER_WARP_UNIT
        of_block = of_warp * -(-threads // _WARP)
        if of_block > _REGISTERS_PER_BLOCK:
            raise KernelLaunchError(
                f"{kernel}: {of_block} registers for a block; {self.name} has {_REGISTERS_PER_BLOCK}"
            )


V100 = Card("V100", "sm_70", 98_304)
T4 = Card("T4", "sm_75", 65_536)
A100 = Card("A100", "sm_80", 166_912)
RTX_3060 = Card("RTX 3060", "sm_86", 101_376)
RTX_4060 = Card("RTX 4060", "sm_89", 101_376)
H100 = Card("H100", "sm_90", 232_448)
