"""CUDA kernels against torch's and against the device's memory bandwidth and tensor cores.

Without a CUDA device it says so and exits with 0; ``make kernels`` and the emulator's tests cover everything that needs
no device. ``benchmarks.cpu_kernels`` measures the CPU's kernels.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from kvkernels import awq_dequantize, kv_pack_reference
from kvkernels.cuda import awq_gemm, cuda_kv_pack
from kvkernels.cuda.cuda_attention import AttentionRows, PagedKV, attend
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.cuda.kernel_select import kernels_for
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
from kvsidecar.chunk_layout import Geometry, layout_of, new_header
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks import report
from benchmarks.kernel_comparison import Implementation, KernelComparison

HEADS, KV_HEADS, DIM = 32, 8, 128


def times_us(way: Implementation, repeats: int) -> list[float]:
    """Return the device times of calls after three warm-up calls, in microseconds."""
    for _ in range(3):
        way()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        way()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return times


def copy_bandwidth(repeats: int) -> float:
    """Measure the bytes per second of a large copy, reads and writes both counted."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / report.median(times_us(lambda: target.copy_(source), repeats)) * 1e6


def product_rate(repeats: int) -> float:
    """Measure the operations per second of a large bf16 product."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / report.median(times_us(lambda: a @ a, repeats)) * 1e6


def attention(kernels: Kernels, out: KernelComparison) -> None:
    for rows, keys in ((2048,) * 2, (8192,) * 2, (16384,) * 2, (128, 16384), (128, 65536), (512, 16384), (512, 65536)):
        _attention(kernels, out, "prefill" if rows == keys else "append", rows, keys, scattered=False)
    for keys in (8192, 32768):
        _attention(kernels, out, "scattered", keys * 15 // 100, keys, scattered=True)
    for batch in (1, 16):
        _decode(kernels, out, batch, 16384)


def _attention(kernels: Kernels, out: KernelComparison, op: str, rows: int, keys: int, scattered: bool) -> None:
    q = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(KV_HEADS, keys, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    positions = torch.arange(keys - rows, keys, device="cuda")
    if scattered:
        positions = torch.randperm(keys, device="cuda")[:rows].sort().values
    at = AttentionRows(_int32(0, rows), _int32(keys), positions.to(torch.int32), rows, keys)
    source, scale = PagedKV(k, v, first_slot=_int32(0)), DIM**-0.5
    query = q.transpose(0, 1)[None]

    def theirs() -> Tensor:
        if scattered:
            mask = torch.arange(keys, device="cuda")[None] <= positions[:, None]
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                whole_k, whole_v = (x.repeat_interleave(HEADS // KV_HEADS, 0)[None] for x in (k, v))
                return F.scaled_dot_product_attention(query, whole_k, whole_v, mask)[0].transpose(0, 1)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            bias: Any = causal_lower_right(rows, keys)
            return F.scaled_dot_product_attention(query, k[None], v[None], bias, enable_gqa=True)[0].transpose(0, 1)

    seen = float(positions.sum() + rows)
    moved = 2.0 * (q.nbytes + k.nbytes)
    name = "SDPA efficient, dense mask" if scattered else "SDPA flash"
    out.add(
        op,
        f"q {rows} k {keys}",
        lambda: attend(kernels, q, source, at, scale),
        name,
        theirs,
        moved,
        4 * seen * HEADS * DIM,
    )


def _decode(kernels: Kernels, out: KernelComparison, batch: int, keys: int) -> None:
    q = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(KV_HEADS, batch * keys, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    at = AttentionRows(_int32(*range(batch + 1)), _int32(*[keys] * batch), None, 1, keys)
    source = PagedKV(k, v, first_slot=_int32(*range(0, batch * keys, keys)))
    whole_k, whole_v = (x.view(KV_HEADS, batch, keys, DIM).transpose(0, 1) for x in (k, v))
    out.add(
        "decode",
        f"batch {batch} k {keys}",
        lambda: attend(kernels, q, source, at, DIM**-0.5),
        "SDPA",
        lambda: F.scaled_dot_product_attention(q[:, :, None], whole_k, whole_v, enable_gqa=True)[:, :, 0],
        2.0 * k.nbytes,
    )


def moving(kernels: Kernels, out: KernelComparison) -> None:
    """Measure dequantization with RoPE shift and scatter of 36 layers of 256 tokens."""
    layers, tokens = 36, 256
    header = new_header(Geometry(layers, KV_HEADS, DIM, DATA_TYPE_BFLOAT16, 8), list(range(tokens)), 512)
    payload = torch.randint(0, 255, (header.payload_bytes,), dtype=torch.uint8)
    for section in layout_of(header).sections:
        if section.type == "<f4":
            payload[section.offset : section.offset + section.size_bytes].view(torch.float32).uniform_(0.01, 0.02)
    arrays = layout_of(header).arrays(memoryview(payload.numpy()))
    on_device, slots = payload.cuda(), torch.randperm(4096)[:tokens]
    pool = [torch.zeros(layers, KV_HEADS, 4096, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    angles = torch.linspace(0, 3, DIM // 2)
    turn = (angles.cos().cuda(), angles.sin().cuda())

    def ours() -> Tensor:
        where = on_device.data_ptr()
        cuda_kv_pack.unpack(kernels, pool[0], pool[1], slots.cuda(), header, where, turn, range(layers))
        return pool[0]

    def theirs() -> Tensor:
        given = (angles.cos().numpy(), angles.sin().numpy())
        kv_pack_reference.unpack(pool[2], pool[3], slots, header, arrays, given, range(layers))
        return pool[2]

    moved = header.payload_bytes + 2 * layers * tokens * KV_HEADS * DIM * 2
    out.add("unpack", f"{layers} layers, {tokens} tokens, 8 bit", ours, "torch reference", theirs, moved)


def products(kernels: Kernels, out: KernelComparison) -> None:
    for size in (4096, 8192):
        words, zeros = (
            torch.randint(-(2**31), 2**31, shape, device="cuda").to(torch.int32)
            for shape in ((size, size // 8), (size // 128, size // 8))
        )
        scales = torch.rand(size // 128, size, dtype=torch.float16, device="cuda") * 0.01
        packed, full = awq_gemm.repack(words, zeros, scales), awq_dequantize.reference_weight(words, zeros, scales)
        for rows in (1, 4, 16):
            x = torch.randn(rows, size, dtype=torch.float16, device="cuda")
            _product(kernels, out, x, packed, full)


def _product(kernels: Kernels, out: KernelComparison, x: Tensor, packed: awq_gemm.AwqWeights, full: Tensor) -> None:
    moved = packed.codes.nbytes + packed.scales.nbytes + packed.zeros.nbytes
    shape = f"M {x.shape[0]}, {packed.inputs} x {packed.outputs}"
    out.add("awq_gemm", shape, lambda: awq_gemm.gemm(kernels, x, packed), "fp16 product", lambda: x @ full.t(), moved)


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not torch.cuda.is_available():
        report.console.print("There is no CUDA device: kernels were not measured. The emulator's tests prove them.")
        return report.write(options, "kernels", [], {"measured": False, "reason": "no CUDA device"})
    choice = kernels_for(torch.device("cuda", 0))
    if choice.kernels is None:
        report.console.print(f"Our kernels cannot be used here: {choice.why}.")
        return report.write(options, "kernels", [], {"measured": False, "reason": choice.why})
    repeats = 5 if options.quick else 20
    out = KernelComparison(repeats, times_us, copy_bandwidth(repeats), product_rate(repeats))
    attention(choice.kernels, out)
    moving(choice.kernels, out)
    products(choice.kernels, out)
    summary = {
        "measured": True,
        "kernels": choice.why,
        **out.summary(),
    }
    return report.write(options, "kernels", out.rows, summary)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    return run(report.parser("kernels", (__doc__ or "").split("\n")[0]).parse_args(arguments))


if __name__ == "__main__":
    main()
