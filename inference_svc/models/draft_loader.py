"""Loads the draft model of another model."""

from __future__ import annotations

from kvsidecar.errors import ConfigurationError

from inference_svc.models.layer_streaming.residency_plan import OFF, StreamingOptions
from inference_svc.models.loader import LoadedModel, load
from inference_svc.models.model_check import SELF

COPY_BITS = 4


def load_draft(name: str, model: str, loaded: LoadedModel, strict: bool, context_length: int = 0) -> LoadedModel:
    """Load the draft model ``name`` for ``loaded``, onto the device of ``loaded``.

    ``model`` is the name from which ``loaded`` was loaded. Raises ConfigurationError or ModelUnsupported for a model
    that cannot be its draft.
    """
    device, dtype = str(loaded.device), str(loaded.dtype).removeprefix("torch.")
    if name == SELF:
        if loaded.device.type != "cpu":
            raise ConfigurationError(f"draft_model is {SELF}, and device {device} quantizes no weights; name a model")
        # A streamed model is copied layer by layer; all layers of the copy stay in memory.
        stream = OFF if loaded.streamed is None else StreamingOptions("partial_resident", keep_first=loaded.layers)
        copy = load(
            model,
            device=device,
            dtype=dtype,
            weights=COPY_BITS,
            strict=strict,
            context_length=context_length,
            stream=stream,
        )
        if loaded.streamed is not None and copy.weights == loaded.weights:
            raise ConfigurationError(
                f"draft_model is {SELF}, and {loaded.id} is streamed at {COPY_BITS} bits: its copy would be itself; "
                "leave draft_model out"
            )
        return copy
    draft = load(name, device=device, dtype=dtype, strict=strict)
    differ = len(loaded.tokenizer.get_vocab().items() ^ draft.tokenizer.get_vocab().items())
    if differ:
        raise ConfigurationError(
            f"draft_model is {name}, whose tokenizer differs from that of {loaded.id} in {differ} tokens; a draft must "
            "have the model's own tokenizer"
        )
    return draft
