"""Builds models without weights on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def build_meta_model(config: Any, dtype: torch.dtype, attention: str) -> tuple[Any, Any]:
    """Build a model on the meta device, and its rotary embedding.

    The rotary embedding has real frequencies, for later insertion. Gemma's scale of embeddings, which no file contains,
    is real as well.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    embedding = model.get_input_embeddings()
    if hasattr(embedding, "scalar_embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    return model, type(model.model.rotary_emb)(config=config)
