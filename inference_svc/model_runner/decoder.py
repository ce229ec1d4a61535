"""Decoder: embedding, layers, norm and head of an unmodified model, layer by layer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from kvkernels import ops
from kvkernels.cpu.head_rows import Likeliest
from kvsidecar.errors import ModelUnsupported
from torch import Tensor

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.lora.adapter_weights import AdapterWeights
from inference_svc.lora.lora_adapter import LoraAdapter, place_adapter
from inference_svc.model_runner import fused_layers
from inference_svc.model_runner.attention import ProjectionDone
from inference_svc.model_runner.attention import register as register_attention
from inference_svc.model_runner.cpu_graph import ModelEnds, StepLogits
from inference_svc.model_runner.forward_batch import ForwardBatch, SequenceSlice
from inference_svc.model_runner.lora_batch import LoraHooks
from inference_svc.model_runner.step_batches import StepBatches
from inference_svc.models import fused_layer_weights
from inference_svc.models.attention_windows import window_of
from inference_svc.models.layer_streaming.layer_source import RESIDENT, LayerLease, LayerSource
from inference_svc.models.linear.dense_linear import DenseLinear, pack_linears
from inference_svc.models.linear.plain_linear import in_float32
from inference_svc.models.linear.quantized_linear import QuantizedLinear
from inference_svc.models.loader import LoadedModel
from inference_svc.models.weight_arena import move_to_arena


class Decoder:
    """Computes forward batches with a loaded model.

    A forward writes the keys and values of its rows to the batch's pool. On a CPU the decoder moves the model's linear
    weights into packed layers, so a loaded model can have only one Decoder.
    """

    recordable = True
    """True if a CUDA graph may contain a forward."""

    def __init__(self, loaded: LoadedModel, fuse: bool = True) -> None:
        """Creates the decoder of a model. Without ``fuse``, a resident model computes with its own layers."""
        register_attention()
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
        # Gemma 3: sliding-window and global layers have different RoPE angles.
        differ = isinstance(getattr(self._rotary, "rope_type", None), dict)
        self._kinds: list[str] | None = list(loaded.config.layer_types) if differ else None
        self._source: LayerSource = RESIDENT
        self._fused: fused_layers.FusedLayers | None = None
        if loaded.streamed is not None:
            self._source = loaded.streamed.source
            if loaded.streamed.fused:
                self._fused = fused_layers.FusedLayers(loaded.model, loaded.streamed.fused, self._source)
        elif not fuse:
            pass
        elif fused_layer_weights.can_fuse_model(loaded.model):
            self._fused = fused_layers.FusedLayers(loaded.model)
        elif (kernels := ops.find_kernels(loaded.device, loaded.dtype)) is not None and (
            fused_layer_weights.can_fuse_model_on_device(loaded.model)
        ):
            self._fused = fused_layers.FusedLayers(loaded.model, kernels=kernels)
        if loaded.device.type == "cpu" and loaded.streamed is None:
            pack_linears(loaded.model)
            self._embed = inner.embed_tokens
            fused = [] if self._fused is None else [p for i in range(self.layers) for p in self._fused.products(i)]
            move_to_arena([*fused, *loaded.model.modules()])
        self._head: Any = loaded.model.lm_head
        self._softcap: float | None = getattr(loaded.config, "final_logit_softcapping", None)
        self._dtype, self._device, self._batches = loaded.dtype, loaded.device, StepBatches(loaded.device)
        self._hooks: LoraHooks | None = None
        self._step: StepLogits | None = None
        if self._fused is not None and self._softcap is None:
            self._fused.attach_ends(ModelEnds(self._embed, self._head), self._dtype)

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def streams(self) -> bool:
        """True if some layers' weights are not always at the same address."""
        return self._source is not RESIDENT

    @torch.inference_mode()
    def place(self, weights: AdapterWeights) -> LoraAdapter:
        """Builds an adapter for this decoder. Rows may use the adapter after ``let_in``. Runs on any thread."""
        return place_adapter(
            weights, {} if self._fused is None else fused_layer_weights.FUSED_LINEARS, self._dtype, self._device
        )

    def adopt(self, weights: AdapterWeights) -> LoraAdapter:
        """Builds an adapter and enables it. Must not run during a forward."""
        adapter = self.place(weights)
        self.let_in(adapter)
        return adapter

    def let_in(self, adapter: LoraAdapter) -> None:
        """Enables an adapter: rows may use it from now on. Must not run during a forward."""
        if self._fused is None:
            self._hooks = self._hooks or LoraHooks(self._layers)
            self._hooks.install(adapter.pairs)

    @torch.inference_mode()
    def compute(self, slices: list[SequenceSlice], pool: KVPool) -> Tensor:
        """Computes the logits ``[wanted, vocabulary]`` of a step, valid until the next step."""
        batch = self._batches.next(slices, pool)
        self._step = None if self._fused is None else self._fused.decode(batch)
        return self(batch) if self._step is None else self._step.logits

    def likeliest(self, logits: Tensor) -> Likeliest | None:
        """Returns the likeliest token of each row, if ``compute`` returned these ``logits`` and knows it."""
        step = self._step
        return None if step is None or step.logits is not logits else step.likeliest

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Computes the logits ``[batch.wanted, vocabulary]`` of ``batch.logit_rows``, in float32."""
        return self.resume(self.embed(batch), batch, 0)

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> Tensor:
        """Computes the hidden states ``[rows, width]`` before the first layer."""
        hidden: Tensor = self._embed(batch.tokens[None])[0]
        return hidden

    @torch.inference_mode()
    def advance(self, hidden: Tensor, batch: ForwardBatch, first: int, end: int) -> Tensor:
        """Computes layers ``first`` to ``end``: hidden states ``[rows, width]``. May change ``hidden``."""
        if self._fused is None:
            return self._run_layers(hidden, batch, first, end)
        self._fused.settle(hidden, batch, self._fused.run(hidden, batch, first, end))
        return hidden

    @torch.inference_mode()
    def project(self, hidden: Tensor, batch: ForwardBatch, layer: int) -> None:
        """Writes the keys and values of one layer to the pool. Does not change ``hidden``."""
        if self._fused is not None:
            self._fused.project(hidden, batch, layer)
            return
        with contextlib.suppress(ProjectionDone):
            self._run_layers(hidden, replace(batch, project_only=True), layer, layer + 1)

    @torch.inference_mode()
    def trace(self, hidden: Tensor, batch: ForwardBatch, layer: int, see: Callable[[Tensor], None]) -> None:
        """Computes one layer as in a forward. Calls ``see`` with the result of each kernel, in order.

        Writes keys and values to the pool and may change ``hidden``. Must not run while another thread runs a forward.
        """
        if self._fused is not None:
            self._fused.trace(hidden, batch, layer, see)
            return

        def shown(_: Any, given: Any, made: Any) -> None:
            for tensor in (*given, *(made if isinstance(made, tuple) else (made,))):
                if isinstance(tensor, Tensor):
                    see(tensor)

        parts = [part for part in self._layers[layer].modules() if next(part.children(), None) is None]
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.callback(part.register_forward_hook(shown).remove)
            see(self._run_layers(hidden, batch, layer, layer + 1))

    def products(self, layer: int) -> list[Any]:
        """Linear layers of layer ``layer``. Their weights may be read only inside ``held(layer)``."""
        if self._fused is not None:
            return self._fused.products(layer)
        return [part for part in self._layers[layer].modules() if hasattr(part, "out_features")]

    def held(self, layer: int) -> LayerLease:
        """Returns a context in which a layer's weights are in memory."""
        return self._source.acquire_layer(layer)

    @torch.inference_mode()
    def normalize(self, hidden: Tensor) -> Tensor:
        """Applies the final norm to ``hidden [rows, width]``; ``rows`` is a multiple of ROW_MULTIPLE."""
        if self._fused is None:
            return self._norm(hidden)  # type: ignore[no-any-return]
        return self._fused.normalize(hidden)

    def form_of(self, layer: int) -> tuple[object, ...]:
        """Returns a key of a layer's computation: layers that differ only in their weights have equal keys."""
        if self._fused is not None:
            return self._fused.form_of(layer)
        parts = self._layers[layer].named_modules()
        found = [
            (name, type(part).__name__, getattr(part, "out_features", 0), *(p.shape for p in part.parameters(False)))
            for name, part in parts
        ]
        kind = self._kinds[layer] if self._kinds is not None else ""
        return kind, window_of(getattr(self._layers[layer], "self_attn", None)), *found

    @torch.inference_mode()
    def angles_at(self, positions: Tensor) -> Iterator[Tensor]:
        """Yields RoPE cosines and sines at ``positions``, for every kind of layer."""
        rotary = copy.deepcopy(self._rotary)  # some rotary modules change their state at each call
        like = torch.zeros(1, 1, 1, dtype=self._dtype, device=self._device)
        for kind in dict.fromkeys(self._kinds or [""]):
            yield from rotary(like, positions[None], *([kind] if kind else []))

    @torch.inference_mode()
    def resume(self, hidden: Tensor, batch: ForwardBatch, first: int) -> Tensor:
        """Computes logits ``[batch.wanted, vocabulary]`` from the hidden states before layer ``first``.

        May change ``hidden``.
        """
        if self._fused is not None:
            states = self._fused.complete(hidden, batch, first)
        else:
            hidden = self._run_layers(hidden, batch, first, self.layers)
            states = self._norm(hidden.index_select(0, batch.logit_rows)) if batch.wanted else None
        if states is None:
            return torch.empty(0, 0)
        if isinstance(self._head, (QuantizedLinear, DenseLinear)):
            # These products give the same bits for any number of rows, so the padding rows are not needed.
            states = states[: batch.wanted]
        logits = in_float32(self._head, states)[: batch.wanted]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _run_layers(self, hidden: Tensor, batch: ForwardBatch, first: int, end: int) -> Tensor:
        """Computes ``hidden [rows, width]`` with the model's own layers."""
        if self._hooks is not None:
            self._hooks.rows, self._hooks.count = batch.adapted, len(batch.tokens)
        states, positions = hidden[None], batch.positions[None]
        angles = self._angles(states, positions, first, end)
        for i, layer in enumerate(self._layers[first:end], first):
            batch.pass_layer(i)
            with self._source.acquire_layer(i):
                out = layer(
                    states,
                    attention_mask=batch,
                    position_ids=positions,
                    past_key_values=None,
                    use_cache=False,
                    position_embeddings=angles[i - first],
                )
            states = out[0] if isinstance(out, tuple) else out
        return states[0]

    def _angles(self, states: Tensor, positions: Tensor, first: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Returns RoPE cosines and sines for each of the layers ``first`` to ``end``."""
        if self._kinds is None:
            return [self._rotary(states, positions)] * (end - first)
        kinds = self._kinds[first:end]
        found = {kind: self._rotary(states, positions, kind) for kind in dict.fromkeys(kinds)}
        return [found[kind] for kind in kinds]
