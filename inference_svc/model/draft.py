"""The model that guesses for another one."""

from __future__ import annotations

from kvsidecar.errors import ConfigurationError

from inference_svc.model.loader import LoadedModel, load
from inference_svc.model.preflight import SELF

_COPY_BITS = 4


def load_draft(name: str, model: str, loaded: LoadedModel, strict: bool, context_length: int = 0) -> LoadedModel:
    """Loads the draft ``name`` for ``loaded``, which was loaded as ``model`` with ``context_length``, onto its device.
    Raises ConfigurationError, ModelUnsupported, when it cannot be one."""
    device, dtype = str(loaded.device), str(loaded.dtype).removeprefix("torch.")
    if name == SELF:
        if loaded.device.type != "cpu":
            raise ConfigurationError(f"draft_model is {SELF}, and device {device} quantizes no weights; name a model")
        return load(model, device=device, dtype=dtype, weights=_COPY_BITS, strict=strict, context_length=context_length)
    draft = load(name, device=device, dtype=dtype, strict=strict)
    differ = len(loaded.tokenizer.get_vocab().items() ^ draft.tokenizer.get_vocab().items())
    if differ:
        raise ConfigurationError(
            f"draft_model is {name}, whose tokenizer differs from that of {loaded.id} in {differ} tokens; a draft must "
            "have the model's own tokenizer"
        )
    return draft
