"""CPU features that determine how a model runs."""

from __future__ import annotations

import platform

import torch


def native_bfloat16() -> bool:
    """Return True if the CPU has bfloat16 multiply instructions.

    oneDNN accepts bfloat16 on every CPU with AVX-512, but without these instructions products of more than a few rows
    take two to six times as long as in float32.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
