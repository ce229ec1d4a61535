"""RoPE scaling: refuses variants that a cache cannot serve, and fixes LongRoPE's frequencies.

transformers computes the frequencies of plain, linear, Llama 3 and YaRN scaling, which are constants of the model.

LongRoPE (Ding et al., arXiv:2402.13753) has a short set of frequencies, for sequences up to the original context, and a
long set, for longer sequences. transformers chooses the set by the longest sequence of a batch, so stored keys would be
wrong as soon as their sequence exceeds the range of the short set. Therefore this module chooses the set once, by the
longest sequence that will be served, as other servers do. If that sequence fits the original context, all answers are
those of the short set. If it is longer, all sequences use the long set.
"""

from __future__ import annotations

from typing import Any

import torch
from kvsidecar.errors import ModelUnsupported
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Kinds of scaling whose angles depend on the sequence length: a stored key would be wrong in a longer sequence.
_UNSUPPORTED = {"dynamic": "dynamic NTK scaling changes all angles as the sequence grows"}


class FrozenLongRope(nn.Module):
    """Cosines and sines ``[1, rows, rotary_dim]`` at fixed frequencies ``inv_freq [rotary_dim / 2]``."""

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._scale = scale

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        half = position_ids[..., None].float() * self.inv_freq.to(x.device)
        angles = torch.cat((half, half), dim=-1)
        return (angles.cos() * self._scale).to(x.dtype), (angles.sin() * self._scale).to(x.dtype)


def check_rope_scaling(name: str, config: Any) -> None:
    """Raise ModelUnsupported if the RoPE frequencies of model ``name`` depend on the sequence length."""
    for kind in sorted(_rope_kinds(config) & _UNSUPPORTED.keys()):
        raise ModelUnsupported(f"{name} uses RoPE of type {kind!r}, which is not supported: {_UNSUPPORTED[kind]}")


def _rope_kinds(config: Any) -> set[str]:
    """RoPE types of a model's layers, as named in the configuration."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [p for p in rope.values() if isinstance(p, dict)] or [rope]
    return {str(p.get("rope_type", "default")) for p in parts}


def freeze_longrope(model: Any, context_length: int) -> str:
    """Fix the frequencies of a LongRoPE model for sequences up to ``context_length``, in place.

    Returns the chosen set, ``short`` or ``long``; empty for a model without LongRoPE.
    """
    config = model.config
    if _rope_kinds(config) != {"longrope"}:
        return ""
    original = int(config.rope_parameters["original_max_position_embeddings"])
    frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=context_length)
    model.model.rotary_emb = FrozenLongRope(frequencies.float(), float(scale))
    return "long" if context_length > original else "short"
