"""RoPE shift: computes the rotations that move stored keys to new positions.

The kernels of ``kv_pack`` apply them while they unpack a chunk.
A stored key is already rotated for its original position. RoPE's rotations add up, so a further rotation by the
difference of positions gives the key at the new position (Su et al., arXiv:2104.09864). This holds for every variant
with fixed frequencies: plain, linear, llama3, YaRN (whose scale is part of the stored key), and partial rotary, which
rotates only the first channels. It does not hold for variants whose frequencies depend on the sequence length; these
are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from kvsidecar.errors import ModelUnsupported
from numpy.typing import NDArray

Rotation = tuple[NDArray[Any], NDArray[Any]]
_SHIFTABLE = ("default", "linear", "llama3", "yarn", "proportional")
_REASONS = {
    "dynamic": "its frequencies change with the length of the sequence",
    "longrope": "its frequencies change when the sequence gets longer than the original context",
}


class RopeShift:
    """RoPE rotations of one model. ``by(delta)`` returns the argument of ``kvkernels.unpack_chunk``."""

    def __init__(self, frequencies: NDArray[np.float64]) -> None:
        self.frequencies = frequencies
        self.by: Callable[[int], Rotation] = lru_cache(4096)(self._by)

    def _by(self, delta: int) -> Rotation:
        """Cosine and sine ``[rotary_dim / 2]`` (float32) of a shift by ``delta`` positions, which may be negative."""
        angles = self.frequencies * delta
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def why_not_shiftable(config: Any) -> str:
    """Reason why a model's keys cannot be shifted; empty if they can."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "the model has no rotary position embedding"
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "unknown"
    if kind == "unknown" or any(isinstance(value, dict) for value in rope.values()):
        return "its layers have different rotary embeddings"
    return "" if kind in _SHIFTABLE else f"rope_type is {kind}: {_REASONS.get(kind, 'it has not been verified')}"


def rope_shift_of(model: Any) -> RopeShift:
    """Build the key rotation of a loaded model. Raises ModelUnsupported with the reason."""
    why = why_not_shiftable(model.config)
    if why:
        raise ModelUnsupported(f"keys of this model cannot be moved to other positions: {why}")
    frequencies = model.model.rotary_emb.inv_freq.detach().to("cpu", torch.float64).numpy()
    return RopeShift(frequencies)
