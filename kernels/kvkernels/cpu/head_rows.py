"""Kernels around a model's head on the CPU: its input in float32, and the largest logit of each row.

Each function returns a KernelCall, for a KernelGraph (``kernels/cpu/head_rows.cpp``), and raises RuntimeError without
kernels.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvkernels.cpu.cpu_library import KernelCall, loaded_kernel

# Tokens of a row whose largest logit is a work item.
_PIECE = 8192
# The first likeliest token of each row and its logit, which is NaN if the row contains NaN.
Likeliest = tuple[list[int], list[float]]


class _WidenJob(ctypes.Structure):
    """``WidenJob`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next_item", "rows", "width")),
        *((name, ctypes.c_void_p) for name in ("from_rows", "to_rows")),
    )


class _LikeliestJob(ctypes.Structure):
    """``LikeliestJob`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next_item", "rows", "width", "pieces")),
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "finished_pieces", "piece_logits", "piece_tokens", "logit", "token")
        ),
    )


def widen(x: Tensor, y: Tensor) -> KernelCall:
    """Write bfloat16 ``x [rows, width]`` to float32 ``y`` of the same shape. Both are contiguous."""
    job = _WidenJob(0, x.shape[0], x.shape[1], x.data_ptr(), y.data_ptr())
    return KernelCall(loaded_kernel("widen_rows", _WidenJob), job, (x, y))


def likeliest(logits: Tensor, peaks: Tensor, tokens: Tensor) -> KernelCall:
    """Write the largest logit of each row to ``peaks [rows]`` and its first token to ``tokens [rows]``, int64.

    ``logits [rows, vocabulary]`` is contiguous float32. The largest logit is NaN if the row contains NaN.
    """
    rows, width = logits.shape
    pieces = -(-width // _PIECE)
    finished = torch.zeros(rows, dtype=torch.int64)
    piece_logits, piece_tokens = torch.empty(rows, pieces), torch.empty(rows, pieces, dtype=torch.int64)
    held = (logits, finished, piece_logits, piece_tokens, peaks, tokens)
    job = _LikeliestJob(0, rows, width, pieces, *(tensor.data_ptr() for tensor in held))
    return KernelCall(loaded_kernel("likeliest", _LikeliestJob), job, held)
