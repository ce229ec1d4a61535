"""Model shape: numbers of a configuration that determine a model's cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inference_svc.models.gguf import gguf_file
from inference_svc.models.gguf.gguf_config import config_of
from inference_svc.models.model_resolver import resolve
from inference_svc.models.pretrained_files import read_config
from inference_svc.models.random_models import config_of_shape


def heads_of(config: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and head dimension; many configurations omit the last two."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return heads, kv_heads, int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def projection_share(config: Any) -> float:
    """Share of a layer's weights in the query, key and value projections."""
    heads, kv_heads, dim = heads_of(config)
    qkv = (heads + 2 * kv_heads) * dim * config.hidden_size
    rest = heads * dim * config.hidden_size + 3 * config.hidden_size * _ffn_width(config)
    return float(qkv / (qkv + rest))


def _ffn_width(config: Any) -> int:
    """Inner width of a layer's feed-forward part for one token.

    In a mixture of experts, the sum of the chosen experts' widths.
    """
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    return experts * int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a model's configuration that determine its cost."""

    layers: int
    projection_share: float  # share of a layer's weights in the query, key and value projections
    token_bytes: int  # bytes of a token's keys and values in a float32 pool; a 16-bit pool needs half


def model_shape(name: str) -> ModelShape:
    """Read the shape of a model without loading it."""
    if name.startswith("shape:"):
        config = config_of_shape(name)
    else:
        found = resolve(name)
        config = config_of(gguf_file.read_gguf(found)) if found.is_file() else read_config(found)
    layers, (_, kv_heads, dim) = int(config.num_hidden_layers), heads_of(config)
    return ModelShape(layers, projection_share(config), 2 * layers * kv_heads * dim * 4)
