"""The model that guesses for another one."""

from __future__ import annotations

from kvsidecar.errors import ConfigurationError

from inference_svc.model.loader import LoadedModel, load
from inference_svc.model.preflight import SELF

_COPY_BITS = 4


def load_draft(name: str, model: str, loaded: LoadedModel, strict: bool) -> LoadedModel:
    """Loads the draft ``name`` for ``loaded``, which was loaded as ``model``, onto its device. Raises
    ConfigurationError, ModelUnsupported, when it cannot be one."""
    device, dtype = str(loaded.device), str(loaded.dtype).removeprefix("torch.")
    if name == SELF:
        if loaded.device.type != "cpu":
            raise ConfigurationError(f"draft_model is {SELF}, and device {device} quantizes no weights; name a model")
        return load(model, device=device, dtype=dtype, weights=_COPY_BITS, strict=strict)
    draft = load(name, device=device, dtype=dtype, strict=strict)
    ours, theirs = loaded.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        differ = sum(ours.get(token) != i for token, i in theirs.items())
        raise ConfigurationError(
            f"draft_model is {name}, whose tokenizer has {len(theirs)} tokens, {differ} of them not those of "
            f"{loaded.id}, which has {len(ours)}; a draft must have the model's own tokenizer"
        )
    return draft
