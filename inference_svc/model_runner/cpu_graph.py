"""CPU graph: all fused layers in one native call, for few rows; for decoding rows with the head and its maxima.

When a small model decodes, Python between the kernels takes as long as the kernels. A CPU graph therefore builds the
kernel calls of a forward once, over static buffers. Each forward then sets only the number of rows and the locations of
their keys. A CPU graph is the CPU's counterpart of CUDA graphs (``inference_svc.model_runner.cuda_graphs``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kvkernels.cpu import head_rows, quantized_gemm
from kvkernels.cpu import norm_rope_silu as cpu_rows
from kvkernels.cpu.cpu_attention import PreparedAttention
from kvkernels.cpu.cpu_graph import KernelGraph
from kvkernels.cpu.cpu_library import KernelCall
from kvkernels.cpu.head_rows import Likeliest
from torch import Tensor, nn

from inference_svc.kv_pool import MAX_BRANCHES
from inference_svc.kv_pool.block_table import UNMAPPED
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cpu_attention
from inference_svc.model_runner.forward_batch import ForwardBatch
from inference_svc.model_runner.rope_table import RopeTable
from inference_svc.models.fused_layer_weights import FusedLayerWeights, LayerWidths
from inference_svc.models.linear.dense_linear import DenseLinear
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.quantized_linear import QuantizedLinear

# Maximum rows of each graph. With more rows, the kernels' time exceeds Python's.
CAPACITIES = (12, 32)
# Maximum size of the attention probabilities of all layers that a graph records for an observer.
MAX_RECORDED_BYTES = 32 << 20
# Maximum number of additional slots to which a row's keys and values are written: one per other branch.
MAX_COPIES = MAX_BRANCHES - 1


def can_capture(batch: ForwardBatch, heads: int) -> bool:
    """True if a batch needs no Python between its kernels.

    Such a batch has few rows, no adapters and no layers that are still being loaded. An observer gets the probabilities
    of all layers at the end, if they fit into ``MAX_RECORDED_BYTES``.
    """
    copies = 0 if batch.copies is None else len(batch.copies.lines)
    recorded = 0 if batch.observer is None else len(batch.pool.keys) * heads * batch.segments[0].keys * 4
    silent = not batch.adapted and not batch.gates and recorded <= MAX_RECORDED_BYTES
    return silent and batch.real <= CAPACITIES[-1] and copies <= MAX_COPIES


@dataclass(frozen=True)
class ModelEnds:
    """The parts of a model before and after its layers."""

    embedding: Any
    head: Any


@dataclass(frozen=True)
class StepLogits:
    """Logits ``[rows, vocabulary]`` of a step, with each row's likeliest token."""

    logits: Tensor
    likeliest: Likeliest


class CpuGraph:
    """Graph of all layers over one pool, for up to ``capacity`` rows. One thread at a time."""

    def __init__(
        self,
        layers: Sequence[FusedLayerWeights],
        widths: LayerWidths,
        last_norm: Callable[[int, Tensor, Tensor, Tensor], KernelCall],
        pool: KVPool,
        capacity: int,
        like: Tensor,
        ends: ModelEnds | None,
    ) -> None:
        """Builds the kernel calls. Raises NotCapturable.

        ``last_norm(rows, hidden, delta, out)`` makes the call of the final norm; the call adds ``delta`` to ``hidden``
        first. ``like`` is a tensor ``[.., hidden]`` of the model's type. Without ``ends``, the graph computes no
        logits.
        """
        self._heads, self._kv_heads = widths.heads, widths.kv_heads

        def rows(*shape: int) -> Tensor:
            return like.new_zeros(capacity, *shape)

        self._hidden, self._normed, self._delta = (rows(like.shape[1]) for _ in range(3))
        self._queries, self._attended = (rows(widths.heads, widths.dim) for _ in range(2))
        self._qkv = rows((widths.heads + 2 * widths.kv_heads) * widths.dim)
        self._gate_up, self._gated = rows(2 * widths.inner), rows(widths.inner)
        self._angles = torch.zeros(capacity, widths.dim), torch.zeros(capacity, widths.dim)
        self._slots = torch.zeros(capacity, dtype=torch.int64)
        self._again, self._copied = torch.full((MAX_COPIES, capacity), UNMAPPED), False
        self._attention = PreparedAttention((pool.keys, pool.values), self._queries, self._attended)
        every = [call for i, layer in enumerate(layers) for call in self._calls(i, layer, pool.layers[i], capacity)]
        norm = last_norm(capacity, self._hidden, self._delta, self._normed)
        self._ends, self._num_layer_calls = ends, len(every) + 1
        head = [] if ends is None else self._head_calls(ends.head)
        self.has_head = bool(head)
        self._chain = KernelGraph([*every, norm, *head])

    def _head_calls(self, head: Any) -> list[KernelCall]:
        """Returns the calls from the final norm to the logits; empty if our kernels do not compute this head."""
        capacity, states = len(self._normed), self._normed
        self._logits = torch.empty(capacity, getattr(head, "out_features", 0))
        calls = []
        if isinstance(head, QuantizedLinear) and states.dtype != torch.float32:
            if head.bias is not None:
                return []
            wide = torch.empty_like(states, dtype=torch.float32)
            calls.append(head_rows.widen(states, wide))
            calls.append(quantized_gemm.gemm_call(wide, head.quantized, None, self._logits))
        else:
            try:
                calls.append(_product(head, states, self._logits))
            except NotCapturable:
                return []
        tokens, peaks = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity)
        self._tokens, self._peaks = tokens.numpy(), peaks.numpy()
        return [*calls, head_rows.likeliest(self._logits, peaks, tokens)]

    def _calls(self, i: int, layer: FusedLayerWeights, kept: tuple[Tensor, Tensor], rows: int) -> Iterator[KernelCall]:
        yield cpu_rows.rms_norm(
            rows, self._hidden, self._delta if i else None, layer.input_norm, layer.epsilon, self._normed
        )
        yield _product(layer.qkv, self._normed, self._qkv)
        yield cpu_rows.rope(
            rows,
            self._qkv,
            self._kv_heads,
            self._angles,
            layer.head_norms,
            layer.epsilon,
            self._slots,
            kept,
            self._queries,
            self._again,
        )
        yield self._attention.call(i, layer.scale, layer.window)
        yield _product(layer.o, self._attended.flatten(1), self._delta)
        yield cpu_rows.rms_norm(rows, self._hidden, self._delta, layer.post_norm, layer.epsilon, self._normed)
        yield _product(layer.gate_up, self._normed, self._gate_up)
        yield cpu_rows.silu_and_mul(rows, self._gate_up, self._gated)
        yield _product(layer.down, self._gated, self._delta)

    def run(self, hidden: Tensor, batch: ForwardBatch, rope: RopeTable) -> Tensor:
        """Computes all layers and the final norm from the hidden states ``[rows, hidden]`` before them.

        Returns ``[capacity, hidden]``, valid until the next run. The batch's rows come first.
        """
        self._hidden[: len(hidden)] = hidden
        self._run(batch, rope, self._num_layer_calls)
        return self._normed

    def decode(self, batch: ForwardBatch, rope: RopeTable) -> StepLogits:
        """Computes the logits of all rows from their tokens, valid until the next run. Needs ``has_head``."""
        assert self._ends is not None
        embedding, to, count = self._ends.embedding, self._hidden[: len(batch.tokens)], batch.real
        if type(embedding) is nn.Embedding and embedding.weight.dtype == to.dtype:
            torch.index_select(embedding.weight, 0, batch.tokens, out=to)
        else:
            to.copy_(embedding(batch.tokens[None])[0])
        self._run(batch, rope)
        return StepLogits(self._logits[:count], (self._tokens[:count].tolist(), self._peaks[:count].tolist()))

    def _run(self, batch: ForwardBatch, rope: RopeTable, calls: int | None = None) -> None:
        """Runs the first ``calls`` calls, or all, over the hidden states."""
        count = len(batch.slots)
        self._slots[:count] = batch.slots
        if self._copied:
            self._again.fill_(UNMAPPED)
        self._copied = batch.copies is not None
        if batch.copies is not None:
            lines = batch.copies.lines
            self._again[: len(lines), :count] = lines
        rope.write(batch.positions, self._hidden, self._angles)
        if batch.attention is None:
            batch.attention = cpu_attention.prepare_attention(batch, self._heads, at_once=True)
        self._attention.set_batch(batch.attention)
        self._chain.run(batch.real, torch.get_num_threads(), calls)
        cpu_attention.report(batch.attention, batch)


class NotCapturable(Exception):
    """The layers cannot be captured, because our kernels do not compute one of their products."""


def _product(of: Any, x: Tensor, y: Tensor) -> KernelCall:
    call = of.call(x, y) if isinstance(of, (DenseLinear, PackedLinear, QuantizedLinear)) else None
    if call is None:
        raise NotCapturable
    return call
