"""Attention of a model's layers: the name of the implementation, and sliding windows."""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface

# Name of the worker's attention in ``transformers.AttentionInterface``; ``model_runner.attention`` implements it.
ATTENTION_NAME = "kvsidecar_rows"

# These classes read the window from the configuration; all other classes read it from the module.
_WINDOW_IN_CONFIG = ("MistralAttention", "MixtralAttention", "Phi3Attention")


def reserve_attention_name() -> None:
    """Register ATTENTION_NAME, so that models can be built with it. Idempotent.

    When a decoder is created, ``model_runner.attention.register`` sets the implementation.
    """
    if ATTENTION_NAME not in AttentionInterface():
        AttentionInterface.register(ATTENTION_NAME, _attend_without_decoder)


def _attend_without_decoder(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this model runs by inference_svc.model_runner.decoder.Decoder only")


def window_of(attention: Any) -> int | None:
    """Number of last keys that a row of a layer attends to, including its own; None for all keys."""
    by_configuration = type(attention).__name__ in _WINDOW_IN_CONFIG
    found: int | None = getattr(attention.config if by_configuration else attention, "sliding_window", None)
    return found


def windows_of(model: Any) -> tuple[int | None, ...]:
    """Windows of all layers; None for a layer that attends to all keys.

    Empty for a model whose attention modules are not found: all its layers are assumed to attend to all keys.
    """
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    known = all(hasattr(layer, "self_attn") for layer in layers)
    return tuple(window_of(layer.self_attn) for layer in layers) if known else ()
