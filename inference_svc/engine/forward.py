"""The decoder loop: embed, layers, norm, head, one layer at a time, over an unmodified model."""

from __future__ import annotations

from typing import Any

import torch
from kvsidecar.errors import ModelUnsupported
from torch import Tensor

from inference_svc.engine import fused
from inference_svc.engine.rows import Batch
from inference_svc.model.loader import LoadedModel
from inference_svc.model.packed_linear import pack_linears


class Decoder:
    """Runs batches of rows and writes their keys and values into the batch's pool.

    On a CPU the model's linear weights move into packed layers: a loaded model serves one Decoder.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        inner: Any = loaded.model.model
        for part in ("embed_tokens", "layers", "norm", "rotary_emb"):
            if not hasattr(inner, part):
                raise ModelUnsupported(
                    f"{loaded.architecture} has no model.{part}; its layers cannot be run one by one"
                )
        self._embed, self._layers, self._norm, self._rotary = (
            inner.embed_tokens,
            inner.layers,
            inner.norm,
            inner.rotary_emb,
        )
        self._fused = fused.FusedLayers(loaded.model) if fused.suits(loaded.model) else None
        if loaded.device.type == "cpu":
            pack_linears(loaded.model)
        self._head: Any = loaded.model.lm_head
        self._softcap: float | None = getattr(loaded.config, "final_logit_softcapping", None)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """Logits ``[batch.wanted, vocabulary]`` of the rows that want them, in the model's dtype."""
        hidden = self._embed(batch.tokens[None])
        states = self._run_layers(hidden, batch) if self._fused is None else self._fused(hidden[0], batch)
        if not batch.wanted:
            return torch.empty(0, 0)
        logits: Tensor = self._head(states)[: batch.wanted]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _run_layers(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The model's own layers. ``hidden [1, rows, width]`` to the normalized states of the wanted rows."""
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
        normed: Tensor = self._norm(hidden[0].index_select(0, batch.logit_rows))
        return normed
