"""Fused decoder layers.

They compute the same mathematics as the model's own layers, in a quarter of the calls. For one row, the memory traffic
of a layer of a 0.5B model takes 0.9 ms on a CPU; the eager layer adds 0.4 ms of Python and small kernels. On an H200,
the eager layers' launches take most of the time (ADR 100). A fused layer consists of four matrix products, four row
kernels and one attention call. It supports models with Llama's layer structure (Llama, Mistral, Qwen2, Qwen3); other
models run their own layers. ``tests/inference_svc/models/test_architectures.py`` compares fused layers with the models'
own layers, ``tests/inference_svc/model_runner/test_device_layer_pass.py`` those of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from kvkernels.cpu import norm_rope_silu as cpu_rows
from kvkernels.cpu.cpu_library import KernelCall
from kvkernels.cuda import layer_rows
from kvkernels.cuda.cuda_library import Kernels
from torch import Tensor

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cpu_attention, cpu_graph
from inference_svc.model_runner.cpu_graph import CpuGraph, ModelEnds, StepLogits
from inference_svc.model_runner.device_layer_pass import DeviceLayerPass
from inference_svc.model_runner.forward_batch import ForwardBatch, keep_logit_rows
from inference_svc.model_runner.layer_pass import LayerPass
from inference_svc.model_runner.rope_table import RopeTable
from inference_svc.models.fused_layer_weights import (
    FusedLayerWeights,
    LayerWidths,
    LinearFn,
    head_dim,
    linear_form,
    make_layer,
    norm_weight,
    take_weights,
)
from inference_svc.models.layer_streaming.layer_source import RESIDENT, LayerSource

# The last layer computes only the rows that need logits, if these are at most 1/4 of all rows.
_FEW = 4


class CpuLayerPass(LayerPass):
    """Pass on a CPU."""

    def __init__(
        self, layers: FusedLayers, hidden: Tensor, batch: ForwardBatch, see: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__(batch, see)
        rows, self._widths, self._real, self.hidden = hidden.shape[0], layers.widths, batch.real, hidden
        self._angles = layers.rope_table.at(batch.positions, hidden)
        self._normed = torch.zeros_like(hidden)
        self._queries = hidden.new_zeros(rows, layers.widths.heads, layers.widths.dim)
        self._attended = hidden.new_zeros(rows, layers.widths.heads, layers.widths.dim)
        self._attention = cpu_attention.prepare_attention(batch, layers.widths.heads)
        self._attention.bind(self._queries, self._attended)
        self._flat = self._attended.view(rows, -1)
        self._gated = hidden.new_zeros(rows, layers.widths.inner)

    def norm(self, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        self._run(cpu_rows.rms_norm(self._real, self.hidden, delta, weight, epsilon, self._normed))
        if delta is not None:
            self._show(self.hidden)
        self._show(self._normed)
        return self._normed

    def rotate(self, i: int, layer: FusedLayerWeights, qkv: Tensor) -> None:
        batch = self.batch
        self._run(
            cpu_rows.rope(
                self._real,
                qkv,
                self._widths.kv_heads,
                self._angles,
                layer.head_norms,
                layer.epsilon,
                batch.slots,
                batch.pool.layers[i],
                self._queries,
                None if batch.copies is None else batch.copies.lines,
            )
        )
        self._show(self._queries)

    def attend(self, i: int, layer: FusedLayerWeights) -> Tensor:
        cpu_attention.attend_in_place(self._attention, self.batch, i, layer.scale, layer.window)
        self._show(self._attended)
        return self._flat

    def gate(self, gate_up: Tensor) -> Tensor:
        self._run(cpu_rows.silu_and_mul(self._real, gate_up, self._gated))
        self._show(self._gated)
        return self._gated

    def finish(self, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        normed = torch.zeros_like(self.hidden)
        self._run(cpu_rows.rms_norm(self._real, self.hidden, delta, weight, epsilon, normed))
        return normed.index_select(0, self.batch.logit_rows)

    def _run(self, call: KernelCall) -> None:
        cpu_rows.run(call, self._real)


class FusedLayers:
    """Fused layers of a model, either ``given`` or built from the model's own layers.

    Building them removes the linear weights from the model.
    """

    def __init__(
        self,
        model: Any,
        given: Sequence[FusedLayerWeights] | None = None,
        source: LayerSource = RESIDENT,
        kernels: Kernels | None = None,
    ) -> None:
        """Build the layers for a CPU or, with ``kernels``, for a device."""
        config = model.config
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.widths = LayerWidths(heads, kv_heads, head_dim(config), int(config.intermediate_size))
        positions = int(getattr(config, "max_position_embeddings", 2048))
        self._kernels, self._rotary = kernels, model.model.rotary_emb
        self.rope_table = RopeTable(model.model.rotary_emb, positions, self.widths.dim)
        self._layers = given or [make_layer(layer, *take_weights(layer)) for layer in model.model.layers]
        self._source = source
        self._final_norm = norm_weight(model.model.norm)
        self._final_epsilon = float(model.model.norm.variance_epsilon)
        # CPU graphs by pool and capacity. Only the thread of the pool runs them.
        self._chains: WeakKeyDictionary[KVPool, dict[int, CpuGraph | None]] = WeakKeyDictionary()
        self._ends: ModelEnds | None = None
        self._like = torch.empty(1, int(config.hidden_size))

    def attach_ends(self, ends: ModelEnds, dtype: torch.dtype) -> None:
        """Lets CPU graphs compute from tokens to logits. ``dtype`` is the hidden states'."""
        self._ends, self._like = ends, self._like.to(dtype)

    def decode(self, batch: ForwardBatch) -> StepLogits | None:
        """Computes a batch whose rows all need logits with a CPU graph; None if no graph can.

        The logits are valid until the next forward.
        """
        if self._ends is None or batch.wanted != batch.real or batch.observer is not None:
            return None
        chain = self._chain(self._like, batch)
        return chain.decode(batch, self.rope_table) if chain is not None and chain.has_head else None

    def run(self, hidden: Tensor, batch: ForwardBatch, first: int, end: int) -> Tensor | None:
        """Computes layers ``first`` to ``end`` over ``hidden [rows, hidden]``, in place.

        Returns the last layer's output, which the caller must still add to ``hidden`` with ``settle``.
        """
        return self._run(self._pass(hidden, batch), first, end)

    def complete(self, hidden: Tensor, batch: ForwardBatch, first: int) -> Tensor | None:
        """Computes the layers from ``first`` on and the final norm. Returns the rows that need logits.

        Returns None if no row needs logits. In the last layer, rows that need no logits compute only keys and values.
        """
        if (
            first == 0
            and (batch.wanted or batch.observer is not None)
            and (chain := self._chain(hidden, batch)) is not None
        ):
            states = chain.run(hidden, batch, self.rope_table)
            return states.index_select(0, batch.logit_rows) if batch.wanted else None
        last, work = len(self._layers) - 1, self._pass(hidden, batch)
        # On a device, the choice of the last layer's rows would wait for the device.
        few = self._kernels is None and batch.wanted <= batch.real // _FEW and batch.observer is None
        if few and first <= last:
            delta = self._run(work, first, last)
            with self._source.acquire_layer(last):  # one lease for both uses of the layer
                self._project(work, last, delta)
                if not batch.wanted:
                    return None
                work = self._pass(hidden.index_select(0, batch.logit_rows), keep_logit_rows(batch))
                delta = self._run(work, last, last + 1)
        else:
            delta = self._run(work, first, last + 1)
        return work.finish(delta, self._final_norm, self._final_epsilon) if batch.wanted else None

    def _pass(self, hidden: Tensor, batch: ForwardBatch, see: Callable[[Tensor], None] | None = None) -> LayerPass:
        if self._kernels is None:
            return CpuLayerPass(self, hidden, batch, see)
        return DeviceLayerPass(self._kernels, self._rotary, self.widths, hidden, batch, see)

    def _run(self, work: LayerPass, first: int, end: int) -> Tensor | None:
        delta: Tensor | None = None
        for i in range(first, end):
            layer = self._layers[i]
            with self._source.acquire_layer(i):
                self._project(work, i, delta)
                delta = work.product(i, "o", layer.o, work.attend(i, layer))
                gate_up = work.product(i, "gate_up", layer.gate_up, work.norm(delta, layer.post_norm, layer.epsilon))
                delta = work.product(i, "down", layer.down, work.gate(gate_up))
        return delta

    def project(self, hidden: Tensor, batch: ForwardBatch, i: int) -> None:
        """Computes only the keys and values of layer ``i``, and writes them to the pool."""
        with self._source.acquire_layer(i):
            self._project(self._pass(hidden, batch), i, None)

    def trace(self, hidden: Tensor, batch: ForwardBatch, i: int, see: Callable[[Tensor], None]) -> None:
        """Computes layer ``i`` over ``hidden``, in place. Calls ``see`` with the output of each kernel.

        ``see`` does not get the keys and values, which are written to the pool.
        """
        self._run(self._pass(hidden, batch, see), i, i + 1)

    def form_of(self, i: int) -> tuple[object, ...]:
        """Returns a key of the computation of layer ``i``: layers that differ only in their weights have equal keys."""
        layer = self._layers[i]
        return layer.head_norms[0] is not None, layer.window, *map(linear_form, self.products(i))

    def products(self, i: int) -> list[LinearFn]:
        """Linear layers of layer ``i``. For a row-parallel layer, only the product of this rank."""
        layer = self._layers[i]
        return [getattr(of, "local", of) for of in (layer.qkv, layer.o, layer.gate_up, layer.down)]

    def normalize(self, hidden: Tensor) -> Tensor:
        """Computes the final norm of ``hidden [rows, hidden]``; does not change ``hidden``."""
        out = torch.empty_like(hidden)
        self._add_norm(len(hidden), hidden, None, out)
        return out

    def settle(self, hidden: Tensor, batch: ForwardBatch, delta: Tensor | None) -> None:
        """Adds the output of ``run`` to ``hidden``, as the next layer would."""
        if delta is not None:
            self._add_norm(batch.real, hidden, delta, torch.empty_like(hidden))

    def _add_norm(self, rows: int, hidden: Tensor, delta: Tensor | None, out: Tensor) -> None:
        if self._kernels is None:
            cpu_rows.run(self.last_norm(rows, hidden, delta, out), rows)
        else:
            layer_rows.add_norm(self._kernels, hidden[:rows], delta, self._final_norm, self._final_epsilon, out[:rows])

    def last_norm(self, rows: int, hidden: Tensor, delta: Tensor | None, out: Tensor) -> KernelCall:
        """Makes the CPU's kernel call of the final norm: adds ``delta`` to ``hidden``, then normalizes into ``out``."""
        return cpu_rows.rms_norm(rows, hidden, delta, self._final_norm, self._final_epsilon, out)

    def _project(self, work: LayerPass, i: int, delta: Tensor | None) -> None:
        """Computes the rotated queries, keys and values of layer ``i``; writes keys and values to the pool.

        It first waits until the layer is loaded, because the rows of a selective recompute replace loaded values.
        """
        work.batch.pass_layer(i)
        layer = self._layers[i]
        normed = work.norm(delta, layer.input_norm, layer.epsilon)
        work.rotate(i, layer, work.product(i, "qkv", layer.qkv, normed))

    def _chain(self, like: Tensor, batch: ForwardBatch) -> CpuGraph | None:
        """Returns the CPU graph for a batch, captured at first use; None if it cannot be captured."""
        if self._kernels is not None or self._source is not RESIDENT:
            return None
        if not cpu_graph.can_capture(batch, self.widths.heads):
            return None
        capacity = next(most for most in cpu_graph.CAPACITIES if batch.real <= most)
        graphs = self._chains.setdefault(batch.pool, {})
        if capacity not in graphs:
            try:
                graphs[capacity] = CpuGraph(
                    self._layers, self.widths, self.last_norm, batch.pool, capacity, like, self._ends
                )
            except cpu_graph.NotCapturable:
                graphs[capacity] = None
        return graphs[capacity]
