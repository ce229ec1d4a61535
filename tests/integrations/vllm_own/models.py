"""Configurations of the models that vLLM's tests name, for the local cache of huggingface_hub."""

from __future__ import annotations

import json
import os
from pathlib import Path

_REVISION = "0" * 40
# The published configurations, reduced to the fields that a scheduler reads.
_CONFIGS = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }
}


def pretend(hub: Path) -> None:
    """Write the configurations into the local cache; make huggingface_hub look for no other files."""
    for name, config in _CONFIGS.items():
        folder = hub / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / _REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(_REVISION)
    os.environ |= {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
