"""Writes a model whose answers are fixed: each token has one next token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from inference_svc.models.model_resolver import DEMO_MODEL

_LOGIT = 10.0


def write_scripted_model(folder: Path, template: str, added: Sequence[str], *scripts: Sequence[str]) -> None:
    """Writes a model with a chat template and additional tokens.

    A script is a list of texts of one token each. The first text is the end of a prompt, and the others are the answer.
    A text may occur in several scripts only at their ends. The model is a layer without effect between the
    embeddings and the head: the likeliest next token depends only on the last token.
    """
    shutil.copytree(DEMO_MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    size = len(tokenizer)
    config |= {"vocab_size": size, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    found = load_file(folder / "model.safetensors")
    weights = {name: tensor for name, tensor in found.items() if name.startswith(("model.norm", "model.layers.0."))}
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embeddings = torch.zeros(size, config["hidden_size"], dtype=torch.bfloat16)
    head, dimensions = torch.zeros_like(embeddings), dict[int, int]()
    for script in scripts:
        for text, following in pairwise(script):
            (token,), (after,) = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (text, following))
            dimension = dimensions.setdefault(token, len(dimensions))
            embeddings[token, dimension], head[after, dimension] = 1.0, _LOGIT
    weights |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
