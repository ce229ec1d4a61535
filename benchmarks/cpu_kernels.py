"""CPU kernels against torch's and against the machine's memory bandwidth and arithmetic.

The bound is the longer of two times: the time to read the data at the bandwidth of a large read, and the time of the
arithmetic at the rate of a large product in the same dtype. Both rates are measured before and after each row, because
the memory of a shared machine changes its speed within seconds. The dtype is the one in which the worker runs a 16-bit
model: bfloat16, or float32 on CPUs without bfloat16. Each call uses the next of several layers, which together are
larger than any CPU cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kvkernels import ChunkPlacement, kv_pack_reference, pack_chunk, unpack_chunk, unpack_chunks
from kvkernels.cpu import f32_gemm
from kvkernels.cpu.bf16_gemv import MAX_ROWS
from kvkernels.cpu.cpu_attention import PAGE, Attention, SequenceRows, num_pages, serves
from kvkernels.cpu.cpu_features import native_bfloat16
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import Geometry, layout_of, new_header
from torch import Tensor

from benchmarks import report
from benchmarks.decode import MachineRates, bound_seconds
from inference_svc.kv_pool.zeroed_tensors import zeros
from inference_svc.models.linear.dense_linear import DenseLinear
from inference_svc.models.linear.packed_linear import PackedLinear

# query heads, KV heads and head dim of Qwen2.5-0.5B and Llama-3-8B
MODELS = {"0.5b": (14, 2, 64), "8b": (32, 8, 128)}
# outputs and inputs of three weights of Qwen2.5-0.5B: gate and up, down, and head
WEIGHTS = ((9728, 896), (896, 4864), (151936, 896))
_CACHES = 300 << 20
Implementation = Callable[[], Any]
Product = Callable[[Tensor], Tensor]


def times_us(way: Implementation, repeats: int) -> list[float]:
    """Return the times of calls after a warm-up call, in microseconds."""
    way()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        way()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _weight(outputs: int, inputs: int) -> Tensor:
    return (torch.randn(outputs, inputs) * 0.02).bfloat16()


class KernelComparison:
    """Measures our kernels against references, and keeps a result row for each.

    A row's bound is at the rates of memory and of products in ``dtype`` that are measured before and after the row.
    """

    def __init__(self, repeats: int, dtype: torch.dtype) -> None:
        self.repeats, self.dtype, self.rows = repeats, dtype, list[dict[str, Any]]()
        self._machine = MachineRates(torch.device("cpu"), dtype)
        self._bandwidths, self._products = list[float](), list[float]()

    def add(
        self,
        op: str,
        shape: str,
        ours: Implementation,
        name: str,
        theirs: Implementation,
        bytes_moved: float,
        operations: float = 0.0,
    ) -> None:
        """Run both, compare the results, and add a row. ``bytes_moved`` and ``operations`` give the bound."""
        got, expected = _tensor(ours()).float(), _tensor(theirs()).float()
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
        ours_times, bandwidth, products = self._machine.beside(lambda: times_us(ours, self.repeats))
        reference_times = times_us(theirs, self.repeats)
        ours_us, reference_us = report.median(ours_times), report.median(reference_times)
        self._bandwidths.append(bandwidth)
        self._products.append(products)
        bound = bound_seconds(bytes_moved, operations, bandwidth, products) * 1e6
        self.rows.append(
            {
                "op": op,
                "shape": shape,
                **report.figure(ours_times, "ours_us", "ours"),
                "reference": name,
                **report.figure(reference_times, "reference_us", "reference"),
                "bound_us": round(bound, 2),
                "max_rel_error": round(error, 6),
                "over_reference": round(reference_us / ours_us, 3),
                "of_bound": round(bound / ours_us, 3),
            }
        )

    def summary(self) -> dict[str, float]:
        """Return the machine's median rates and the largest error of all rows."""
        return {
            "read_gb_per_s": round(report.median(self._bandwidths) / 1e9, 1),
            "product_tflops": round(report.median(self._products) / 1e12, 3),
            "max_rel_error": max(row["max_rel_error"] for row in self.rows),
        }


def _tensor(found: Any) -> Tensor:
    out = found[0] if isinstance(found, tuple) else found
    assert isinstance(out, Tensor)
    return out


def attention(out: KernelComparison, models: Sequence[str]) -> None:
    for model in models:
        for op, rows, keys in (
            ("prefill", 512, 512),
            ("append", 512, 4096),
            ("append", 32, 4096),
            ("scattered", 614, 4096),
        ):
            _attention(out, model, op, rows, keys)
        for batch, keys in ((1, 1024), (8, 1024), (1, 4096)):
            _decode(out, model, batch, keys)


def _pool(model: str, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[layers, kv_heads, keys, dim]`` in large pages, as a pool is.

    All layers together exceed the CPU's caches.
    """
    _, kv_heads, dim = MODELS[model]
    layers = -(-_CACHES // (2 * kv_heads * keys * dim * dtype.itemsize))
    k, v = (zeros((layers, kv_heads, keys, dim), dtype).normal_() for _ in range(2))
    return k, v


def _attention(out: KernelComparison, model: str, op: str, rows: int, keys: int) -> None:
    heads, _, dim = MODELS[model]
    k, v = _pool(model, keys, out.dtype)
    positions = np.arange(keys - rows, keys)
    if op == "scattered":
        positions = np.sort(np.random.default_rng(0).permutation(keys)[:rows])
    q = torch.randn(rows, heads, dim, dtype=out.dtype)
    found = torch.empty_like(q)
    pages = np.arange(num_pages(keys)) * PAGE
    ours = Attention(positions, [SequenceRows(0, rows, pages)], heads, (k, v))
    ours.bind(q, found)

    def run(layer: int) -> Tensor:
        ours(layer, dim**-0.5, None)
        return found

    hidden = torch.arange(keys) > torch.from_numpy(positions)[:, None]
    mask = torch.zeros(rows, keys, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
    repeated = mask.repeat(heads // k.shape[1], 1)
    ways = [_sdpa(q, k[i : i + 1], v[i : i + 1], mask, repeated) for i in range(len(k))]
    name = _fastest({way: _in_turn([layer[way] for layer in ways]) for way in ways[0]})
    theirs = _in_turn([layer[name] for layer in ways])
    seen = float(positions.sum() + rows)
    moved = 2.0 * (q.nbytes + k[0].nbytes)
    out.add(
        op,
        f"{model}: q {rows} k {keys}",
        _in_turn([partial(run, i) for i in range(len(k))]),
        name,
        theirs,
        moved,
        4 * seen * heads * dim,
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, repeated: Tensor) -> dict[str, Implementation]:
    """Return torch's implementations of causal attention by name.

    ``repeated`` has the rows of ``mask`` once for each query head of a KV head.
    """
    (rows, heads, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    per_kv = heads // kv_heads
    # Query heads of a KV head as rows, so that torch reads keys once.
    packed = q.view(rows, kv_heads, per_kv, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, per_kv * rows, dim)

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, mask, enable_gqa=True)[0].transpose(0, 1)

    def by_packed_heads() -> Tensor:
        found = F.scaled_dot_product_attention(packed, k, v, repeated)
        return found.view(heads, rows, dim).transpose(0, 1)

    def causal() -> Tensor:
        query = q.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    ways: dict[str, Implementation] = {"SDPA, mask": masked, "SDPA, mask, heads packed": by_packed_heads}
    return ways | {"SDPA, causal": causal} if rows == keys else ways


def _fastest(ways: dict[str, Implementation]) -> str:
    """Return the name of the implementation that is the fastest on this machine."""
    return min(ways, key=lambda name: report.median(times_us(ways[name], 3)))


def _decode(out: KernelComparison, model: str, batch: int, keys: int) -> None:
    heads, kv_heads, dim = MODELS[model]
    k, v = _pool(model, batch * keys, out.dtype)
    q = torch.randn(batch, heads, dim, dtype=out.dtype)
    found, each = torch.empty_like(q), num_pages(keys)
    rows = [SequenceRows(n, 1, (np.arange(each) + n * each) * PAGE) for n in range(batch)]
    ours = Attention(np.full(batch, keys - 1), rows, heads, (k, v))
    ours.bind(q, found)

    def run(layer: int) -> Tensor:
        ours(layer, dim**-0.5, None)
        return found

    # Query heads of a KV head as rows, so that torch reads keys once.
    packed = q.view(batch, kv_heads, heads // kv_heads, dim)
    whole_k, whole_v = (x.view(len(k), kv_heads, batch, keys, dim).transpose(1, 2) for x in (k, v))

    def theirs(layer: int) -> Tensor:
        return F.scaled_dot_product_attention(packed, whole_k[layer], whole_v[layer]).view(batch, heads, dim)

    mine, torchs = (_in_turn([partial(way, i) for i in range(len(k))]) for way in (run, theirs))
    out.add("decode", f"{model}: batch {batch} k {keys}", mine, "SDPA, heads packed", torchs, 2.0 * k[0].nbytes)


def products(out: KernelComparison, weights: Sequence[tuple[int, int]]) -> None:
    for outputs, inputs in weights:
        stored = [_weight(outputs, inputs) for _ in range(-(-_CACHES // (outputs * inputs * 2)))]
        if out.dtype == torch.bfloat16:
            packed = [PackedLinear(weight, None) for weight in stored]
            mine: list[Product] = [*packed]
            name, theirs = "oneDNN, packed", [layer.by_onednn for layer in packed]
        else:
            mine = [DenseLinear(f32_gemm.pack(weight.float()), None) for weight in stored]
            name, theirs = "torch, float32", [partial(F.linear, weight=weight.float()) for weight in stored]
        for rows in (4, 8, MAX_ROWS, 512):
            x = torch.randn(rows, inputs, dtype=out.dtype)
            for layer in mine:  # the first call selects the kernel
                layer(x)
            # The bound counts the weights at their stored size, which is 16 bits each.
            moved, operations = 2.0 * outputs * inputs, 2.0 * rows * outputs * inputs
            ours, peers = (_in_turn([partial(layer, x) for layer in layers]) for layers in (mine, theirs))
            out.add("product", f"M {rows}, {inputs} x {outputs}", ours, name, peers, moved, operations)


def _in_turn(layers: Sequence[Implementation]) -> Implementation:
    """Return an implementation whose calls use the layers in turn."""
    turns = cycle(layers)
    return lambda: next(turns)()


def moving(out: KernelComparison) -> None:
    """Measure how long it takes to pack and unpack a chunk of 24 layers and 256 tokens, at 8 bits."""
    layers, tokens, (_, kv_heads, dim) = 24, 256, MODELS["0.5b"]
    stored = DATA_TYPE_BFLOAT16 if out.dtype == torch.bfloat16 else DATA_TYPE_FLOAT32
    header = new_header(Geometry(layers, kv_heads, dim, stored, 8), list(range(tokens)), 512)
    pool = [torch.randn(layers, kv_heads, 4096, dim).to(out.dtype) for _ in range(2)]
    pool += [x.clone() for x in pool]
    payload, slots = torch.zeros(header.payload_bytes, dtype=torch.uint8), torch.randperm(4096)[:tokens]
    memory = memoryview(payload.numpy())
    arrays = layout_of(header).arrays(memory)
    moved = header.payload_bytes + 2.0 * layers * tokens * kv_heads * dim * out.dtype.itemsize

    def pack() -> Tensor:
        pack_chunk(pool[0], pool[1], slots, header, memory)
        return payload

    def pack_reference() -> Tensor:
        kv_pack_reference.pack(pool[0], pool[1], slots, header, arrays)
        return payload

    def unpack() -> Tensor:
        unpack_chunk(pool[0], pool[1], slots, header, memory)
        return pool[0]

    def unpack_reference() -> Tensor:
        kv_pack_reference.unpack(pool[2], pool[3], slots, header, arrays, None, range(layers))
        return pool[2]

    shape = f"{layers} layers, {tokens} tokens, 8 bit"
    out.add("pack", shape, pack, "torch reference", pack_reference, moved)
    out.add("unpack", shape, unpack, "torch reference", unpack_reference, moved)

    # One call unpacks all chunks of a prompt, as a load does.
    count = 16
    pieces = [ChunkPlacement(header, memory, torch.arange(n * tokens, (n + 1) * tokens)) for n in range(count)]

    def restore() -> Tensor:
        for _ in unpack_chunks(pool[0], pool[1], pieces, [range(layers)]):
            pass
        return pool[0]

    def restore_one_by_one() -> Tensor:
        for piece in pieces:
            unpack_chunk(pool[2], pool[3], piece.slots, piece.header, piece.payload)
        return pool[2]

    shape = f"{layers} layers, {count} chunks of {tokens} tokens, 8 bit"
    out.add("restore", shape, restore, "ours, one by one", restore_one_by_one, count * moved)


def run(options: argparse.Namespace) -> dict[str, Any]:
    dtype = torch.bfloat16 if native_bfloat16() else torch.float32
    if not serves(dtype, 64):
        report.console.print("Our kernels cannot be used on this CPU.")
        return report.write(options, "cpu_kernels", [], {"measured": False})
    models, weights, repeats = (["0.5b"], WEIGHTS[:2], 3) if options.quick else ([*MODELS], WEIGHTS, 20)
    with torch.inference_mode():
        out = KernelComparison(repeats, dtype)
        attention(out, models)
        products(out, weights)
        moving(out)
    return report.write(options, "cpu_kernels", out.rows, {"measured": True, "dtype": str(dtype), **out.summary()})


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    return run(report.parser("cpu_kernels", (__doc__ or "").split("\n")[0]).parse_args(arguments))


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
