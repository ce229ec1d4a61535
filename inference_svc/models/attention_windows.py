"""How far the layers of a model look back."""

from __future__ import annotations

from typing import Any

# Their attention reads the window from the configuration, all others' from the module.
_WINDOW_IN_CONFIG = ("MistralAttention", "MixtralAttention", "Phi3Attention")


def window_of(attention: Any) -> int | None:
    """How many of the last keys a row sees in a layer's attention, its own included; None for all of them."""
    by_configuration = type(attention).__name__ in _WINDOW_IN_CONFIG
    found: int | None = getattr(attention.config if by_configuration else attention, "sliding_window", None)
    return found


def windows_of(model: Any) -> tuple[int | None, ...]:
    """The same of all layers; empty for a model whose attention is not where others have it, which may see all."""
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    known = all(hasattr(layer, "self_attn") for layer in layers)
    return tuple(window_of(layer.self_attn) for layer in layers) if known else ()
