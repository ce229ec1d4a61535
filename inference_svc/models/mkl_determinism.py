"""Products that give a row the same bits in every batch, where that has to be asked for.

MKL multiplies few rows in another order than many, unless it is told to be reproducible ("conditional numerical
reproducibility", strict mode). It reads that once, at its first product; so it is set before a model is loaded. On CPUs
that are not Intel's the strict mode does not exist, and rows padded to a multiple of four are enough
(docs/adr/004-batch-invariance.md).
"""

from __future__ import annotations

import os
from pathlib import Path

SETTING = "MKL_CBWR"


def make_mkl_deterministic() -> None:
    """Asks MKL for reproducible products, unless the environment has a wish of its own."""
    wanted = wanted_setting()
    if wanted and SETTING not in os.environ:
        os.environ[SETTING] = wanted


def wanted_setting() -> str:
    """What this machine's CPU needs to be told; empty where there is nothing to tell."""
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
