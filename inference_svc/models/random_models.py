"""Configurations of well-known models for random weights, to measure speed without checkpoints.

Imports transformers only when a configuration is built.
"""

from __future__ import annotations

from typing import Any

from kvsidecar.errors import ModelUnsupported

PREFIX = "shape:"
# Name of a transformers configuration class, and its values.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "qwen2.5-3b": (
        "Qwen2Config",
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "llama-3.1-8b": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "tiny": (
        "Qwen2Config",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 4096,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}


def check_shape(name: str) -> None:
    """Raise ModelUnsupported if ``shape:NAME`` is unknown."""
    if name.removeprefix(PREFIX) not in _SHAPES:
        raise ModelUnsupported(f"the shape {name.removeprefix(PREFIX)!r} is not known; known are {', '.join(_SHAPES)}")


def config_of_shape(name: str) -> Any:
    """Build the configuration of ``shape:NAME``. Raises ModelUnsupported."""
    import transformers

    check_shape(name)
    kind, values = _SHAPES[name.removeprefix(PREFIX)]
    return getattr(transformers, kind)(**values)


def values_of(name: str) -> dict[str, Any]:
    """Return the configuration values of ``shape:NAME``. Raises ModelUnsupported."""
    check_shape(name)
    return _SHAPES[name.removeprefix(PREFIX)][1]
