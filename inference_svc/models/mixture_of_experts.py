"""Batch-invariant mixture of experts on the CPU.

As in transformers' eager layers, each expert computes its own rows. The rows that an expert gets depend on the whole
batch, but a row's bits must not depend on the batch. So an expert's rows are padded to the multiple at which matrix
kernels give a row the same bits, and outputs are added in the order of experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

from inference_svc.models.linear.plain_linear import ROW_MULTIPLE

EXPERTS = "kvsidecar_experts"


def num_experts(config: Any) -> int:
    """Number of a mixture's experts; 0 for a dense model."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def run_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run ``hidden [rows, width]`` through experts ``chosen [rows, k]`` with ``weights [rows, k]``.

    ``module`` holds ``gate_up_proj [experts, 2 inner, width]``, ``down_proj [experts, width, inner]`` and the
    activation. Returns the shape of ``hidden``.
    """
    out = torch.zeros_like(hidden)
    for expert in sorted(set(chosen.flatten().tolist())):
        row, place = torch.where(chosen == expert)
        x = F.pad(hidden[row], (0, 0, 0, -len(row) % ROW_MULTIPLE))
        gate, up = F.linear(x, module.gate_up_proj[expert]).chunk(2, dim=-1)
        # Contiguous: the layout of a row must not depend on the number of rows.
        x = F.linear(module.act_fn(gate.contiguous()) * up, module.down_proj[expert])
        out.index_add_(0, row, (x[: len(row)] * weights[row, place, None]).to(out.dtype))
    return out


def register_experts() -> None:
    """Register the function with transformers. Idempotent."""
    ExpertsInterface.register(EXPERTS, run_experts)
