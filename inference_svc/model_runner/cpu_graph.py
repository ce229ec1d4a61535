"""CPU graph: all fused layers in one native call, for few rows.

When a small model decodes, Python between the kernels takes as long as the kernels. A CPU graph therefore builds the
kernel calls of a forward once, over static buffers. Each forward then sets only the number of rows and the locations of
their keys. A CPU graph is the CPU's counterpart of CUDA graphs (``inference_svc.model_runner.cuda_graphs``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from kvkernels.cpu import norm_rope_silu as cpu_rows
from kvkernels.cpu.cpu_attention import PreparedAttention
from kvkernels.cpu.cpu_graph import KernelGraph
from kvkernels.cpu.cpu_library import KernelCall
from torch import Tensor

from inference_svc.kv_pool import MAX_BRANCHES
from inference_svc.kv_pool.block_table import UNMAPPED
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cpu_attention
from inference_svc.model_runner.forward_batch import ForwardBatch
from inference_svc.models.fused_layer_weights import FusedLayerWeights, LayerWidths, LinearFn
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
    ) -> None:
        """Builds the kernel calls. Raises NotCapturable.

        ``last_norm(rows, hidden, delta, out)`` makes the call of the final norm; the call adds ``delta`` to ``hidden``
        first. ``like`` is a tensor ``[.., hidden]`` of the model's type.
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
        self._chain = KernelGraph([*every, norm])

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

    def run(self, hidden: Tensor, batch: ForwardBatch, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Computes all layers and the final norm. ``angles``: cosines and sines ``[rows, dim]``.

        Returns ``[capacity, hidden]``, valid until the next run. The batch's rows come first.
        """
        count = len(hidden)
        self._hidden[:count] = hidden
        self._slots[:count] = batch.slots
        if self._copied:
            self._again.fill_(UNMAPPED)
        self._copied = batch.copies is not None
        if batch.copies is not None:
            lines = batch.copies.lines
            self._again[: len(lines), :count] = lines
        for kept, new in zip(self._angles, angles, strict=True):
            kept[:count] = new
        attention = cpu_attention.prepare_attention(batch, self._heads, at_once=True)
        self._attention.set_batch(attention)
        self._chain.run(batch.real, torch.get_num_threads())
        cpu_attention.report(attention, batch)
        return self._normed


class NotCapturable(Exception):
    """The layers cannot be captured, because our kernels do not compute one of their products."""


def _product(of: LinearFn, x: Tensor, y: Tensor) -> KernelCall:
    call = of.call(x, y) if isinstance(of, (DenseLinear, PackedLinear, QuantizedLinear)) else None
    if call is None:
        raise NotCapturable
    return call
