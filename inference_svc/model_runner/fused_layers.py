"""Fused decoder layers for the CPU.

They compute the same mathematics as the model's own layers, in a quarter of the calls. For one row, the memory traffic
of a layer of a 0.5B model takes 0.9 ms; the eager layer adds 0.4 ms of Python and small kernels. A fused layer consists
of four packed matrix products, three compiled row kernels and one attention call. It supports models with Llama's layer
structure (Llama, Mistral, Qwen2, Qwen3); other models run their own layers.
``tests/inference_svc/models/test_architectures.py`` compares fused layers with the models' own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from kvkernels.cpu import norm_rope_silu as cpu_rows
from kvkernels.cpu.cpu_library import KernelCall
from torch import Tensor

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cpu_attention, cpu_graph
from inference_svc.model_runner.cpu_graph import CpuGraph
from inference_svc.model_runner.forward_batch import ForwardBatch, keep_logit_rows
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


class _LayerPass:
    """Buffers of a forward through some layers. Calls ``see`` with the output of each kernel."""

    def __init__(
        self, layers: FusedLayers, hidden: Tensor, batch: ForwardBatch, see: Callable[[Tensor], None] | None = None
    ) -> None:
        rows, self.see = hidden.shape[0], see
        self.batch, self.real, self.hidden = batch, batch.real, hidden
        self.angles = layers.rope_table.at(batch.positions, hidden)
        self.normed = torch.zeros_like(hidden)
        self.queries = hidden.new_zeros(rows, layers.widths.heads, layers.widths.dim)
        self.attended = hidden.new_zeros(rows, layers.widths.heads, layers.widths.dim)
        self.attention = cpu_attention.prepare_attention(batch, layers.widths.heads)
        self.attention.bind(self.queries, self.attended)
        self.flat = self.attended.view(rows, -1)
        self.gated = hidden.new_zeros(rows, layers.widths.inner)

    def product(self, i: int, name: str, of: LinearFn, x: Tensor) -> Tensor:
        """Computes a product of layer ``i`` over ``x [rows, in]``. Adds the adapters' products of their rows."""
        out = of(x)
        for part in self.batch.adapted:
            part.add((i, name), x, out)
        if self.see is not None:
            self.see(out)
        return out

    def run(self, call: KernelCall, *outputs: Tensor) -> None:
        """Runs a kernel, which writes to ``outputs``, over all rows."""
        cpu_rows.run(call, self.real)
        if self.see is not None:
            for output in outputs:
                self.see(output)

    def attend(self, i: int, layer: FusedLayerWeights) -> None:
        """Computes the attention of layer ``i``, from ``queries`` to ``attended``."""
        cpu_attention.attend_in_place(self.attention, self.batch, i, layer.scale, layer.window)
        if self.see is not None:
            self.see(self.attended)


class FusedLayers:
    """Fused layers of a model, either ``given`` or built from the model's own layers.

    Building them removes the linear weights from the model.
    """

    def __init__(
        self, model: Any, given: Sequence[FusedLayerWeights] | None = None, source: LayerSource = RESIDENT
    ) -> None:
        config = model.config
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.widths = LayerWidths(heads, kv_heads, head_dim(config), int(config.intermediate_size))
        positions = int(getattr(config, "max_position_embeddings", 2048))
        self.rope_table = RopeTable(model.model.rotary_emb, positions, self.widths.dim)
        self._layers = given or [make_layer(layer, *take_weights(layer)) for layer in model.model.layers]
        self._source = source
        self._final_norm = norm_weight(model.model.norm)
        self._final_epsilon = float(model.model.norm.variance_epsilon)
        # CPU graphs by pool and capacity. Only the thread of the pool runs them.
        self._chains: WeakKeyDictionary[KVPool, dict[int, CpuGraph | None]] = WeakKeyDictionary()

    def run(self, hidden: Tensor, batch: ForwardBatch, first: int, end: int) -> Tensor | None:
        """Computes layers ``first`` to ``end`` over ``hidden [rows, hidden]``, in place.

        Returns the last layer's output, which the caller must still add to ``hidden`` with ``settle``.
        """
        return self._run(_LayerPass(self, hidden, batch), first, end)

    def complete(self, hidden: Tensor, batch: ForwardBatch, first: int) -> Tensor | None:
        """Computes the layers from ``first`` on and the final norm. Returns the rows that need logits.

        Returns None if no row needs logits. In the last layer, rows that need no logits compute only keys and values.
        """
        if (
            first == 0
            and (batch.wanted or batch.observer is not None)
            and cpu_graph.can_capture(batch, self.widths.heads)
            and (chain := self._chain(hidden, batch)) is not None
        ):
            states = chain.run(hidden, batch, self.rope_table.at(batch.positions, hidden))
            return states.index_select(0, batch.logit_rows) if batch.wanted else None
        last = len(self._layers) - 1
        if batch.wanted <= batch.real // _FEW and first <= last and batch.observer is None:
            work = _LayerPass(self, hidden, batch)
            delta = self._run(work, first, last)
            with self._source.acquire_layer(last):  # one lease for both uses of the layer
                self._project(work, last, delta)
                if not batch.wanted:
                    return None
                hidden, batch = hidden.index_select(0, batch.logit_rows), keep_logit_rows(batch)
                delta = self._run(_LayerPass(self, hidden, batch), last, last + 1)
        else:
            delta = self._run(_LayerPass(self, hidden, batch), first, last + 1)
        if not batch.wanted:
            return None
        normed = torch.zeros_like(hidden)
        cpu_rows.run(self.last_norm(batch.real, hidden, delta, normed), batch.real)
        return normed.index_select(0, batch.logit_rows)

    def _run(self, work: _LayerPass, first: int, end: int) -> Tensor | None:
        delta: Tensor | None = None
        for i in range(first, end):
            layer = self._layers[i]
            with self._source.acquire_layer(i):
                self._project(work, i, delta)
                work.attend(i, layer)
                delta = work.product(i, "o", layer.o, work.flat)
                rows, norm = work.real, layer.post_norm
                normed = cpu_rows.rms_norm(rows, work.hidden, delta, norm, layer.epsilon, work.normed)
                work.run(normed, work.hidden, work.normed)
                gate_up = work.product(i, "gate_up", layer.gate_up, work.normed)
                work.run(cpu_rows.silu_and_mul(rows, gate_up, work.gated), work.gated)
                delta = work.product(i, "down", layer.down, work.gated)
        return delta

    def project(self, hidden: Tensor, batch: ForwardBatch, i: int) -> None:
        """Computes only the keys and values of layer ``i``, and writes them to the pool."""
        with self._source.acquire_layer(i):
            self._project(_LayerPass(self, hidden, batch), i, None)

    def trace(self, hidden: Tensor, batch: ForwardBatch, i: int, see: Callable[[Tensor], None]) -> None:
        """Computes layer ``i`` over ``hidden``, in place. Calls ``see`` with the output of each kernel.

        ``see`` does not get the keys and values, which are written to the pool.
        """
        self._run(_LayerPass(self, hidden, batch, see), i, i + 1)

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
        cpu_rows.run(self.last_norm(len(hidden), hidden, None, out), len(hidden))
        return out

    def settle(self, hidden: Tensor, batch: ForwardBatch, delta: Tensor | None) -> None:
        """Adds the output of ``run`` to ``hidden``, as the next layer would."""
        if delta is not None:
            last = self.last_norm(batch.real, hidden, delta, torch.empty_like(hidden))
            cpu_rows.run(last, batch.real)

    def last_norm(self, rows: int, hidden: Tensor, delta: Tensor | None, out: Tensor) -> KernelCall:
        """Makes the kernel call of the final norm: adds ``delta`` to ``hidden``, then normalizes into ``out``."""
        return cpu_rows.rms_norm(rows, hidden, delta, self._final_norm, self._final_epsilon, out)

    def _project(self, work: _LayerPass, i: int, delta: Tensor | None) -> None:
        """Computes the rotated queries, keys and values of layer ``i``; writes keys and values to the pool.

        It first waits until the layer is loaded, because the rows of a selective recompute replace loaded values.
        """
        work.batch.pass_layer(i)
        layer, rows = self._layers[i], work.real
        norm = cpu_rows.rms_norm(rows, work.hidden, delta, layer.input_norm, layer.epsilon, work.normed)
        work.run(norm, work.normed)
        rotate = cpu_rows.rope(
            rows,
            work.product(i, "qkv", layer.qkv, work.normed),
            self.widths.kv_heads,
            work.angles,
            layer.head_norms,
            layer.epsilon,
            work.batch.slots,
            work.batch.pool.layers[i],
            work.queries,
            None if work.batch.copies is None else work.batch.copies.lines,
        )
        work.run(rotate, work.queries)

    def _chain(self, hidden: Tensor, batch: ForwardBatch) -> CpuGraph | None:
        """Returns the CPU graph for a batch, captured at first use; None if a product cannot be captured."""
        if self._source is not RESIDENT:
            return None
        capacity = next(most for most in cpu_graph.CAPACITIES if batch.real <= most)
        graphs = self._chains.setdefault(batch.pool, {})
        if capacity not in graphs:
            try:
                graphs[capacity] = CpuGraph(self._layers, self.widths, self.last_norm, batch.pool, capacity, hidden)
            except cpu_graph.NotCapturable:
                graphs[capacity] = None
        return graphs[capacity]
