"""Device weights: a checkpoint loaded tensor by tensor, without a copy of the model in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kvsidecar.models.checkpoint_files import tensor_files

from inference_svc.models.meta_model import build_meta_model, set_generation_config, set_weights
from inference_svc.models.safetensors_reader import tensor_in
from inference_svc.models.surplus_weights import check_surplus


def load_to_device(folder: Path, config: Any, dtype: torch.dtype, attention: str, device: torch.device) -> Any | None:
    """Load a model's weights to a device, at most one tensor at a time in host memory.

    Returns None if the files name the weights differently: transformers itself renames and merges the weights of some
    architectures, such as mixtures. Raises ModelUnsupported for weights that the model has no place for.
    """
    model, where = build_meta_model(config, dtype, attention), tensor_files(folder)
    parameters = dict(model.named_parameters())
    if not parameters.keys() <= where.keys():
        return None
    check_surplus(folder, model, where)
    set_weights(model, {name: tensor_in(where, name).to(device).to(meta.dtype) for name, meta in parameters.items()})
    set_generation_config(model, folder)
    return model
