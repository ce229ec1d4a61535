"""Sliding windows of a model's attention layers."""

from __future__ import annotations

from typing import Any

# These read the window from the configuration, all others from the module.
_WINDOW_IN_CONFIG = ("MistralAttention", "MixtralAttention", "Phi3Attention")


def window_of(attention: Any) -> int | None:
    """Number of last keys that a row of a layer sees, its own included; None for all."""
    by_configuration = type(attention).__name__ in _WINDOW_IN_CONFIG
    found: int | None = getattr(attention.config if by_configuration else attention, "sliding_window", None)
    return found


def windows_of(model: Any) -> tuple[int | None, ...]:
    """Windows of all layers; empty for a model whose attention modules are not found, which is taken to see all."""
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    known = all(hasattr(layer, "self_attn") for layer in layers)
    return tuple(window_of(layer.self_attn) for layer in layers) if known else ()
