"""The decoder loop: embed, layers, norm, head, one layer at a time, over an unmodified model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inference_svc.engine.rows import Batch
from inference_svc.model.loader import LoadedModel
from kvsidecar.errors import ModelUnsupported


class Decoder:
    """Runs batches of rows. Writes keys and values into the batch's pool; owns no memory of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        inner: Any = loaded.model.model
        for part in ("embed_tokens", "layers", "norm", "rotary_emb"):
            if not hasattr(inner, part):
                raise ModelUnsupported(f"{loaded.architecture} has no model.{part}; its layers cannot be run one by one")
        self._embed, self._layers, self._norm, self._rotary = (
            inner.embed_tokens,
            inner.layers,
            inner.norm,
            inner.rotary_emb,
        )
        self._head: Any = loaded.model.lm_head
        self._softcap: float | None = getattr(loaded.config, "final_logit_softcapping", None)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """Logits ``[batch.wanted, vocabulary]`` of the rows that want them, in the model's dtype."""
        hidden = self._embed(batch.tokens[None])
        positions = batch.positions[None]
        angles = self._rotary(hidden, positions)
        for layer in self._layers:
            out = layer(
                hidden,
                attention_mask=batch,
                position_ids=positions,
                past_key_values=None,
                use_cache=False,
                position_embeddings=angles,
            )
            hidden = out[0] if isinstance(out, tuple) else out
        if not batch.wanted:
            return hidden.new_empty(0, 0)
        hidden = self._norm(hidden[0].index_select(0, batch.logit_rows))
        logits: Tensor = self._head(hidden)[: batch.wanted]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
