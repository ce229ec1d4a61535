"""Sets MKL's strict mode, so that a row gets the same bits in every batch.

MKL multiplies few rows in another order than many, unless the program requests reproducible results ("conditional
numerical reproducibility", strict mode). MKL reads the setting at its first product, so the setting must precede
loading a model. The strict mode exists on Intel's CPUs only. On other CPUs, padding rows to a multiple of four is
enough (docs/adr/004-batch-invariance.md).
"""

from __future__ import annotations

import os
from pathlib import Path

SETTING = "MKL_CBWR"


def make_mkl_deterministic() -> None:
    """Request reproducible products from MKL, unless the environment sets the variable already."""
    wanted = wanted_setting()
    if wanted and SETTING not in os.environ:
        os.environ[SETTING] = wanted


def wanted_setting() -> str:
    """Value of the variable for this machine's CPU; empty if the CPU needs no setting."""
    return _wanted(_cpuinfo())


def _wanted(cpuinfo: str) -> str:
    if "GenuineIntel" not in cpuinfo:
        return ""
    return "AVX512,STRICT" if " avx512f " in cpuinfo else "AVX2,STRICT" if " avx2 " in cpuinfo else ""


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
