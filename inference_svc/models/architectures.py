"""Checks whether a model's architecture can be served.

A model is supported if a row's key and value depend only on the row's hidden state and position. So the model must be
decoder only. It must apply rotary positions (or no positions) to queries and keys inside attention. It must call
attention through ``transformers.AttentionInterface``.
"""

from __future__ import annotations

from kvsidecar.errors import ModelUnsupported
from transformers import PretrainedConfig

from inference_svc.models.rope_scaling import check_rope_scaling
from inference_svc.models.supported_architectures import check_name

# Granite's and Cohere's scales of embeddings and logits. Those inside layers are computed by the model's own layers.
_SCALES = ("embedding_multiplier", "logits_scaling", "logit_scale")


def check_architecture(name: str, config: PretrainedConfig, strict: bool = True) -> None:
    """Raise ModelUnsupported with the reason. Without ``strict``, architectures that were not verified pass."""
    check_name(name, strict)
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelUnsupported(f"{name} attends in both directions here, so that no key depends on its prefix alone")
    for option in _SCALES:
        if (value := getattr(config, option, None)) not in (None, 1):
            raise ModelUnsupported(f"{name} scales by {option} ({value}) outside of its layers, which is not computed")
    check_rope_scaling(name, config)
