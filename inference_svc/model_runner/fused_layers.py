"""Fused decoder layers for the CPU: the same mathematics as the model's own layers, in a quarter of the calls.

At one row a 0.5B model's layer is 0.9 ms of memory traffic; the eager layer adds 0.4 ms of Python and small
kernels to it. Here a layer is four packed matrix products, three compiled row kernels and one attention call. It
serves models whose layers have Llama's structure (Llama, Mistral, Qwen2, Qwen3); others run their own layers.
``tests/inference_svc/models/test_architectures.py`` holds both against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from kvkernels.cpu import cpu_attention as kernel
from kvkernels.cpu import norm_rope_silu as cpu_rows
from kvkernels.cpu.cpu_library import KernelCall
from torch import Tensor, nn

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cpu_attention, cpu_graph
from inference_svc.model_runner.cpu_graph import CpuGraph
from inference_svc.model_runner.decoder_layer import FusedLayerWeights, LayerWidths, LinearFn
from inference_svc.model_runner.forward_batch import ForwardBatch, keep_logit_rows
from inference_svc.models.attention_windows import window_of
from inference_svc.models.layer_streaming.layer_source import RESIDENT, LayerSource
from inference_svc.models.linear.dense_linear import DenseLinear, linear_for
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import PlainLinear
from inference_svc.models.linear.quantized_linear import QuantizedLinear, can_join, join_linears

_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
# The last layer is cut to the rows that want logits where they are at most one in so many.
_FEW = 4
# What each product of a layer computes, in the order of its outputs.
FUSED_LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
Joined = PackedLinear | QuantizedLinear | DenseLinear | PlainLinear


def can_fuse_model(model: Any) -> bool:
    """Whether the model's layers can be fused: on a CPU, of a known structure, with SiLU gates and whole heads
    rotated."""
    return all(can_fuse(layer, model.config) for layer in model.model.layers)


def can_fuse(layer: Any, config: Any) -> bool:
    """Whether one layer can be."""
    return has_fusable_structure(layer, config) and layer.input_layernorm.weight.device.type == "cpu"


def has_fusable_structure(layer: Any, config: Any) -> bool:
    """Whether one layer can be when it is on a CPU."""
    if type(layer).__name__ not in _LAYERS:
        return False
    weight = layer.input_layernorm.weight
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        weight.dtype in (torch.float32, torch.bfloat16)
        and config.hidden_act == "silu"
        and kernel.serves(weight.dtype, _head_dim(config))
        and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
        and all(can_join(parts) for parts in _together(layer))
    )


def _together(layer: Any) -> list[list[Any]]:
    """Linear layers over the same input."""
    return [[layer.get_submodule(path) for path in FUSED_LINEARS[name]] for name in ("qkv", "gate_up")]


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _join(parts: list[Any]) -> Joined:
    """One product for several linear layers over the same input; the parts' own weights can go."""
    if isinstance(parts[0], QuantizedLinear):
        return join_linears(parts)
    weight = torch.cat([p.weight for p in parts])
    bias = torch.cat([p.bias for p in parts]) if parts[0].bias is not None else None
    return linear_for(weight, bias)


def _weight(norm: Any) -> Tensor:
    return norm.weight.detach().float().contiguous()  # type: ignore[no-any-return]


def take_weights(layer: Any) -> tuple[dict[str, Joined], dict[str, Tensor]]:
    """The products of a layer and its norms, by the names of their fields. Drops its linear modules, so that each
    weight is held once."""
    a, m = layer.self_attn, layer.mlp
    qkv, gate_up = _together(layer)
    products = {"qkv": _join(qkv), "o": _join([a.o_proj]), "gate_up": _join(gate_up), "down": _join([m.down_proj])}
    norms = {"input_norm": _weight(layer.input_layernorm), "post_norm": _weight(layer.post_attention_layernorm)}
    if hasattr(a, "q_norm"):
        norms |= {"q_norm": _weight(a.q_norm), "k_norm": _weight(a.k_norm)}
    for module, names in ((a, ("q_proj", "k_proj", "v_proj", "o_proj")), (m, ("gate_proj", "up_proj", "down_proj"))):
        for name in names:
            setattr(module, name, nn.Identity())
    return products, norms


def make_layer(layer: Any, products: Mapping[str, LinearFn], norms: Mapping[str, Tensor]) -> FusedLayerWeights:
    """A layer of what was ``gathered`` from it; its own module only says how it computes."""
    a = layer.self_attn
    return FusedLayerWeights(
        qkv=products["qkv"],
        o=products["o"],
        gate_up=products["gate_up"],
        down=products["down"],
        input_norm=norms["input_norm"],
        post_norm=norms["post_norm"],
        head_norms=(norms.get("q_norm"), norms.get("k_norm")),
        epsilon=float(layer.input_layernorm.variance_epsilon),
        scale=float(a.scaling),
        window=window_of(a),
    )


def linear_form(product: Any) -> tuple[object, ...]:
    """What decides how a product is computed, but for its weights."""
    kept, stored = getattr(product, "quantized", None), getattr(product, "dense", None)
    width = (kept.bits, kept.group) if kept is not None else getattr(stored, "kept", "")
    return type(product).__name__, product.in_features, product.out_features, product.bias is not None, width


class _LayerPass:
    """Buffers of one pass over some layers. ``see`` is shown what each kernel gives."""

    def __init__(
        self, layers: FusedLayers, hidden: Tensor, batch: ForwardBatch, see: Callable[[Tensor], None] | None = None
    ) -> None:
        rows, self.see = hidden.shape[0], see
        self.batch, self.real, self.hidden = batch, batch.real, hidden
        self.angles = layers.angles(batch.positions, hidden)
        self.normed = torch.zeros_like(hidden)
        self.queries = hidden.new_zeros(rows, layers.widths.heads, layers.widths.dim)
        self.attended = hidden.new_zeros(rows, layers.widths.heads, layers.widths.dim)
        self.attention = cpu_attention.prepare_attention(batch, layers.widths.heads)
        self.attention.bind(self.queries, self.attended)
        self.flat = self.attended.view(rows, -1)
        self.gated = hidden.new_zeros(rows, layers.widths.inner)

    def product(self, i: int, name: str, of: LinearFn, x: Tensor) -> Tensor:
        """A product of layer ``i`` over ``x [rows, in]``, with what adapters add to some of its rows."""
        out = of(x)
        for part in self.batch.adapted:
            part.add((i, name), x, out)
        if self.see is not None:
            self.see(out)
        return out

    def run(self, call: KernelCall, *outputs: Tensor) -> None:
        """Runs a kernel over all rows, which writes to ``outputs``."""
        cpu_rows.run(call, self.real)
        if self.see is not None:
            for output in outputs:
                self.see(output)

    def attend(self, i: int, layer: FusedLayerWeights) -> None:
        """The attention of layer ``i``, from ``queries`` to ``attended``."""
        cpu_attention.attend_in_place(self.attention, self.batch, i, layer.scale, layer.window)
        if self.see is not None:
            self.see(self.attended)


class FusedLayers:
    """All layers of a model, those ``given`` or its own, of which it takes the linear weights then."""

    def __init__(
        self, model: Any, given: Sequence[FusedLayerWeights] | None = None, source: LayerSource = RESIDENT
    ) -> None:
        config = model.config
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.widths = LayerWidths(heads, kv_heads, _head_dim(config), int(config.intermediate_size))
        self._rotary = model.model.rotary_emb
        self._cos = self._sin = torch.empty(0, self.widths.dim)
        self._layers = given or [make_layer(layer, *take_weights(layer)) for layer in model.model.layers]
        self._source = source
        self._final_norm = _weight(model.model.norm)
        self._final_epsilon = float(model.model.norm.variance_epsilon)
        # By pool, whose thread alone runs them, and by capacity.
        self._chains: WeakKeyDictionary[KVPool, dict[int, CpuGraph | None]] = WeakKeyDictionary()

    def run(self, hidden: Tensor, batch: ForwardBatch, first: int, end: int) -> Tensor | None:
        """Layers ``first`` to ``end`` over ``hidden [rows, hidden]``, changed in place. What the last one still adds
        to it is returned, for ``settle``."""
        return self._run(_LayerPass(self, hidden, batch), first, end)

    def complete(self, hidden: Tensor, batch: ForwardBatch, first: int) -> Tensor | None:
        """Normalized states of the rows that want logits, after all layers from ``first`` on; None when none does.

        Of the last layer, rows that want none compute their keys and values only.
        """
        if (
            first == 0
            and batch.wanted
            and cpu_graph.can_capture(batch)
            and (chain := self._chain(hidden, batch)) is not None
        ):
            states = chain.run(hidden, batch, self.angles(batch.positions, hidden))
            return states.index_select(0, batch.logit_rows)
        last = len(self._layers) - 1
        if batch.wanted <= batch.real // _FEW and first <= last and batch.observer is None:
            work = _LayerPass(self, hidden, batch)
            delta = self._run(work, first, last)
            with self._source.acquire_layer(last):  # for both of its uses
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
        """Writes keys and values of layer ``i`` to the pool, and no more."""
        with self._source.acquire_layer(i):
            self._project(_LayerPass(self, hidden, batch), i, None)

    def trace(self, hidden: Tensor, batch: ForwardBatch, i: int, see: Callable[[Tensor], None]) -> None:
        """Layer ``i`` over ``hidden``, which is changed; ``see`` is shown what each of its kernels gives, but for the
        keys and values that it writes to the pool."""
        self._run(_LayerPass(self, hidden, batch, see), i, i + 1)

    def form_of(self, i: int) -> tuple[object, ...]:
        """What decides how layer ``i`` is computed; equal for layers that differ in their weights alone."""
        layer = self._layers[i]
        return layer.head_norms[0] is not None, layer.window, *map(linear_form, self.products(i))

    def products(self, i: int) -> list[LinearFn]:
        layer = self._layers[i]
        return [layer.qkv, layer.o, layer.gate_up, layer.down]

    def normalize(self, hidden: Tensor) -> Tensor:
        """The norm behind the last layer of ``hidden [rows, hidden]``, which stays as it is."""
        out = torch.empty_like(hidden)
        cpu_rows.run(self.last_norm(len(hidden), hidden, None, out), len(hidden))
        return out

    def settle(self, hidden: Tensor, batch: ForwardBatch, delta: Tensor | None) -> None:
        """Adds what ``run`` left over, as the next layer would."""
        if delta is not None:
            last = self.last_norm(batch.real, hidden, delta, torch.empty_like(hidden))
            cpu_rows.run(last, batch.real)

    def last_norm(self, rows: int, hidden: Tensor, delta: Tensor | None, out: Tensor) -> KernelCall:
        """After the last layer, as ``kvkernels.cpu.norm_rope_silu.norm``."""
        return cpu_rows.rms_norm(rows, hidden, delta, self._final_norm, self._final_epsilon, out)

    def _project(self, work: _LayerPass, i: int, delta: Tensor | None) -> None:
        """Up to the rotated queries of layer ``i``, with its keys and values in the pool: after what is being loaded of
        it, which a repair's rows replace."""
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
        """What runs such a batch in one call; None where some product is no kernel of ours."""
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

    def angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[rows, dim]`` from a table that the model's own rotary module filled."""
        longest = int(positions.max()) + 1
        if longest > len(self._cos):
            size = 1 << (longest - 1).bit_length()
            cos, sin = self._rotary(like[None, :1], torch.arange(size)[None])
            self._cos, self._sin = cos[0].float(), sin[0].float()
        return self._cos[positions], self._sin[positions]
