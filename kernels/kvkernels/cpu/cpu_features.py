"""What this CPU can do that decides how a model is run."""

from __future__ import annotations

import platform

import torch


def native_bfloat16() -> bool:
    """Whether it multiplies bfloat16 itself. oneDNN takes bfloat16 on every CPU with AVX-512, too, and without such
    units products of more than a few rows take two to six times as long as in float32."""
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
