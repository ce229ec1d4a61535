"""Device weights: a checkpoint loaded tensor by tensor, without a copy of the model in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig

from inference_svc.models.awq_checkpoint import tensor_files, tensor_in


def load_to_device(folder: Path, config: Any, dtype: torch.dtype, attention: str, device: torch.device) -> Any | None:
    """Load a model's weights to a device, at most one tensor at a time in host memory.

    Returns None if the files name the weights differently: transformers itself renames and merges the weights of some
    architectures, such as mixtures.
    """
    model, where = _without_weights(config, dtype, attention), tensor_files(folder)
    parameters = dict(model.named_parameters())
    if not parameters.keys() <= where.keys():
        return None
    state = {name: tensor_in(where, name).to(device).to(meta.dtype) for name, meta in parameters.items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _without_weights(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """Build a model with parameters on the meta device and all buffers, which no checkpoint contains."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Tensor | None:
        return None if parameter is None or parameter.is_meta else nn.Parameter(parameter.to("meta"))

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    finally:
        hook.remove()
