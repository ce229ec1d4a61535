"""Times of every kernel, against torch's kernels and against the card's limits.

A CUDA graph replays the calls, each with the next of several buffers. All buffers together are larger than the L2
cache, so a call never finds its inputs there. The bound of a call is the longer of two times: its bytes at the rate of
a large copy, and its operations at the rate of a large product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kvkernels import awq_layout
from kvkernels.cuda import awq_gemm, cuda_kv_pack
from kvkernels.cuda.cuda_attention import AttentionRows, CascadeAttention, PagedKV, attend
from kvkernels.cuda.piece_table import PieceTable, TablePiece, sections_at
from kvkernels.device.device_port import DeviceLacks
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
from kvsidecar.chunk_layout import Geometry, layout_of, new_header
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks import report
from benchmarks.first_contact.contact_device import ContactDevice, GpuDevice
from benchmarks.first_contact.row import RowFile

HEADS, KV_HEADS, DIM = 32, 8, 128
_ROTATED_BYTES, _MAX_BUFFERS = 256 << 20, 16
Call = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured copies, products and batches."""

    copy_bytes: int = 1 << 30
    product: int = 8192
    prefill: tuple[tuple[int, int], ...] = ((2048, 2048), (8192, 8192), (512, 16384))
    decode: tuple[tuple[int, int], ...] = ((1, 16384), (16, 8192))
    layers: int = 36
    linear: tuple[int, ...] = (4096, 8192)


_SMALL = Sizes(1 << 20, 128, ((64, 128),), ((1, 256),), 1, (256,))


class KernelTimes:
    """Measures our kernels and their references, and adds a row for each reference."""

    def __init__(self, device: ContactDevice, rows: RowFile, sizes: Sizes) -> None:
        self._device, self._rows = device, rows
        place, count = device.torch, sizes.copy_bytes // 2
        source, target = (torch.empty(count, dtype=torch.uint8, device=place) for _ in range(2))
        self.bandwidth = 2 * count / self._median([lambda: target.copy_(source)]) * 1e6
        a = torch.randn(sizes.product, sizes.product, device=place).bfloat16()
        self.products = 2 * sizes.product**3 / self._median([lambda: a @ a]) * 1e6
        rows.measured("copy", f"{self.bandwidth / 1e9:.0f} GB/s", f"{sizes.copy_bytes >> 20} MiB, read and written")
        rows.measured("GEMM", f"{self.products / 1e12:.1f} TFLOPS", f"bfloat16, {sizes.product}")

    def compare(
        self, case: str, ours: Sequence[Call], references: dict[str, Sequence[Call]], moved: float, operations: float
    ) -> None:
        """Measure calls over rotating buffers. If a reference refuses the case, its row has the reason."""
        try:
            ours_us = self._median(ours)
        except RuntimeError as error:
            self._rows.raised(case, error)
            return
        bound_us = max(moved / self.bandwidth, operations / self.products) * 1e6
        self._rows.measured(case, f"{ours_us:.1f} us", f"bound {bound_us:.1f} us", bound_us / ours_us)
        for name, calls in references.items():
            try:
                theirs_us = self._median(calls)
            except RuntimeError as error:
                self._rows.measured(case, f"{ours_us:.1f} us", f"{name}: {str(error).splitlines()[0][:100]}")
            else:
                self._rows.measured(case, f"{ours_us:.1f} us", f"{name} {theirs_us:.1f} us", theirs_us / ours_us)

    def _median(self, calls: Sequence[Call]) -> float:
        return report.median(self._device.times_us(calls))


def measure_kernels(device: ContactDevice, rows: RowFile) -> None:
    """Measure attention, packing and products; count the rows in which ours is slower than torch."""
    sizes = Sizes() if isinstance(device, GpuDevice) else _SMALL
    times = KernelTimes(device, rows, sizes)
    for count, keys in sizes.prefill:
        _prefill(device, times, count, keys)
    for batch, keys in sizes.decode:
        _decode(device, times, batch, keys)
    _decode_behind_a_prefix(device, times, *sizes.decode[-1])
    _packing(device, times, sizes.layers)
    for size in sizes.linear:
        _products(device, times, size)
    try:
        _decode_beyond_the_pool(device, times, sizes.decode[0][1])
    except DeviceLacks as error:
        rows.raised("keys in host memory", error)
    compared = [row for row in rows.read() if row.speedup is not None and not row.reference.startswith("bound")]
    slower = sum(1 for row in compared if row.speedup is not None and row.speedup < 1)
    rows.measured("slower than torch", f"{slower} of {len(compared)} rows")


def _buffers(device: ContactDevice, size_bytes: int) -> range:
    """Return the indices of buffers of this size, which together exceed the L2 cache."""
    return range(min(_MAX_BUFFERS, -(-_ROTATED_BYTES // size_bytes)) if isinstance(device, GpuDevice) else 1)


def _int32(device: ContactDevice, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device.torch)


def _random(device: ContactDevice, *shape: int) -> Tensor:
    return torch.randn(shape, device=device.torch).bfloat16()


def _prefill(device: ContactDevice, times: KernelTimes, count: int, keys: int) -> None:
    """Measure prefill of the last ``count`` tokens of a sequence of ``keys`` tokens."""
    several = _buffers(device, 2 * KV_HEADS * keys * DIM * 2)
    q, scale = _random(device, count, HEADS, DIM), DIM**-0.5
    kv = [(_random(device, KV_HEADS, keys, DIM), _random(device, KV_HEADS, keys, DIM)) for _ in several]
    rows = AttentionRows(_int32(device, 0, count), _int32(device, keys), None, count, keys)
    first, query = _int32(device, 0), q.transpose(0, 1)[None]

    def ours(k: Tensor, v: Tensor) -> Call:
        return lambda: attend(device.kernels, q, PagedKV(k, v, first_slot=first), rows, scale)

    def theirs(backend: SDPBackend, k: Tensor, v: Tensor) -> Call:
        bias: Any = causal_lower_right(count, keys)

        def call() -> Tensor:
            with sdpa_kernel(backend):
                if count == keys:
                    return F.scaled_dot_product_attention(query, k[None], v[None], is_causal=True, enable_gqa=True)
                return F.scaled_dot_product_attention(query, k[None], v[None], bias, enable_gqa=True)

        return call

    seen = count * keys - count * (count - 1) / 2
    times.compare(
        f"attention of {count} rows over {keys} keys",
        [ours(*pair) for pair in kv],
        {
            name: [theirs(backend, *pair) for pair in kv]
            for name, backend in (
                ("flash", SDPBackend.FLASH_ATTENTION),
                ("cuDNN", SDPBackend.CUDNN_ATTENTION),
            )
        },
        2.0 * q.nbytes + 2 * kv[0][0].nbytes,
        4 * seen * HEADS * DIM,
    )


def _decode(device: ContactDevice, times: KernelTimes, batch: int, keys: int) -> None:
    several, shape = _buffers(device, 2 * KV_HEADS * batch * keys * DIM * 2), (KV_HEADS, batch * keys, DIM)
    q, kv = _random(device, batch, HEADS, DIM), [(_random(device, *shape), _random(device, *shape)) for _ in several]
    rows = AttentionRows(_int32(device, *range(batch + 1)), _int32(device, *[keys] * batch), None, 1, keys)
    first = _int32(device, *range(0, batch * keys, keys))

    def ours(k: Tensor, v: Tensor) -> Call:
        return lambda: attend(device.kernels, q, PagedKV(k, v, first_slot=first), rows, DIM**-0.5)

    times.compare(
        f"attention, decode of {batch} over {keys} keys",
        [ours(*pair) for pair in kv],
        _decode_of_torch(q, kv),
        2.0 * kv[0][0].nbytes,
        4.0 * batch * keys * HEADS * DIM,
    )


def _decode_of_torch(query: Tensor, kv: list[tuple[Tensor, Tensor]]) -> dict[str, list[Call]]:
    """Return decode by torch's kernels, over keys and values of which each sequence has its own."""

    def call(backend: SDPBackend, pair: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = (x.view(KV_HEADS, len(query), -1, DIM).transpose(0, 1) for x in pair)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

    return {
        "flash": [partial(call, SDPBackend.FLASH_ATTENTION, pair) for pair in kv],
        "cuDNN": [partial(call, SDPBackend.CUDNN_ATTENTION, pair) for pair in kv],
    }


def _decode_behind_a_prefix(device: ContactDevice, times: KernelTimes, batch: int, keys: int, own: int = 128) -> None:
    """Measure decode of sequences that share a prefix. Torch's kernels read a copy of it for each sequence."""
    several, total = _buffers(device, 2 * KV_HEADS * batch * (keys + own) * DIM * 2), keys + own
    q, shape = _random(device, batch, HEADS, DIM), (KV_HEADS, batch * total, DIM)
    kv = [(_random(device, *shape), _random(device, *shape)) for _ in several]
    starts, lengths = _int32(device, *range(batch + 1)), _int32(device, *[own] * batch)
    first = _int32(device, *range(keys, batch * total, total))
    behind = AttentionRows(starts, lengths, None, 1, own)
    last = _int32(device, *[keys - 1] * batch)
    prefix, at = AttentionRows(_int32(device, 0, batch), _int32(device, keys), last, batch, keys), _int32(device, 0)

    def ours(k: Tensor, v: Tensor) -> Tensor:
        sources = CascadeAttention(device.kernels, q, behind, DIM**-0.5)
        sources.add(PagedKV(k, v, first_slot=at), rows=prefix)
        sources.add(PagedKV(k, v, first_slot=first))
        return sources.combined()[0]

    times.compare(
        f"attention, decode of {batch} over {keys} shared and {own} own keys",
        [partial(ours, *pair) for pair in kv],
        _decode_of_torch(q, kv),
        4.0 * KV_HEADS * (keys + batch * own) * DIM,
        4.0 * batch * total * HEADS * DIM,
    )


def _decode_beyond_the_pool(device: ContactDevice, times: KernelTimes, keys: int) -> None:
    """Measure decode over keys in host memory, against a copy of them to device memory."""
    own, q = 256, _random(device, 1, HEADS, DIM)
    strips = [device.extended(KV_HEADS, own * DIM * 2, keys * DIM * 2).view(torch.bfloat16) for _ in range(2)]
    k, v = (each.view(KV_HEADS, own + keys, DIM).zero_() for each in strips)
    rows = AttentionRows(_int32(device, 0, 1), _int32(device, keys), None, 1, keys)
    source, copies = PagedKV(k, v, _int32(device, own)), [_random(device, KV_HEADS, keys, DIM) for _ in range(2)]

    def copy() -> None:
        for target, strip in zip(copies, (k, v), strict=True):
            target.copy_(strip[:, own:])

    times.compare(
        f"attention, decode of 1 over {keys} keys in host memory",
        [lambda: attend(device.kernels, q, source, rows, DIM**-0.5)],
        {"copy over the link": [copy]},
        2.0 * copies[0].nbytes,
        4.0 * keys * HEADS * DIM,
    )


def _packing(device: ContactDevice, times: KernelTimes, layers: int) -> None:
    """Measure packing of chunks of 128 tokens, and unpacking with a RoPE shift; the bound is a copy."""
    tokens, place = 128, device.torch
    pool = [_random(device, layers, KV_HEADS, 4096, DIM) for _ in range(2)]
    angles = np.linspace(0, 3, DIM // 2, dtype=np.float32)
    turn, slots = (np.cos(angles), np.sin(angles)), torch.randperm(4096)
    for bits in (16, 8, 4):
        header = new_header(Geometry(layers, KV_HEADS, DIM, DATA_TYPE_BFLOAT16, bits), list(range(tokens)), 512)
        for count in (1, 16 if isinstance(device, GpuDevice) else 2):
            several = _buffers(device, count * (8 << 20))
            chunks = [torch.zeros(count * header.payload_bytes, dtype=torch.uint8, device=place) for _ in several]
            pieces = [
                TablePiece(header, some, range(layers), sections_at(header, i * header.payload_bytes), turn)
                for i, some in enumerate(slots.split(tokens)[:count])
            ]
            packed, unpacked = (
                [_call(device, kernel, pool, PieceTable(pieces, packs), chunk) for chunk in chunks]
                for kernel, packs in ((cuda_kv_pack.pack, True), (cuda_kv_pack.unpack, False))
            )
            of_payloads = sum(s.size_bytes for s in layout_of(header).sections)
            moved = count * (of_payloads + 2.0 * layers * tokens * KV_HEADS * DIM * 2)
            what = f"{'a chunk' if count == 1 else f'{count} chunks'}, {bits} bits, {layers} layers"
            for call in packed:
                call()
            times.compare(f"pack {what}", packed, {}, moved, 0)
            times.compare(f"unpack {what}", unpacked, {}, moved, 0)


def _call(
    device: ContactDevice, kernel: Callable[..., None], pool: Sequence[Tensor], table: PieceTable, payloads: Tensor
) -> Call:
    there = table.to(device.torch)
    return lambda: kernel(device.kernels, *pool, table, there.data_ptr(), payloads.data_ptr())


def _products(device: ContactDevice, times: KernelTimes, size: int) -> None:
    """Measure products of 4-bit weights in groups of 128, against 16-bit weights and torch's 4-bit product."""
    place, on_gpu = device.torch, isinstance(device, GpuDevice)
    several = _buffers(device, size * size // 2)
    words, zeros = (
        torch.randint(-(2**31), 2**31, shape, device=place).to(torch.int32)
        for shape in ((size, size // 8), (size // 128, size // 8))
    )
    scales = (torch.rand(size // 128, size, device=place) * 0.01).bfloat16()
    one = awq_gemm.repack(words, zeros, scales)
    packed = [awq_gemm.AwqWeights(one.codes.clone(), one.scales.clone(), one.zeros.clone(), one.group) for _ in several]
    full = [awq_layout.reference_weight(words, zeros, scales).t().contiguous() for _ in several]
    codes = torch.randint(0, 255, (size, size // 2), dtype=torch.uint8, device=place)
    scales_zeros = torch.stack((scales, torch.zeros_like(scales)), -1).contiguous()
    convert = getattr(torch, "_convert_weight_to_int4pack" + ("" if on_gpu else "_for_cpu"))
    multiply = getattr(torch, "_weight_int4pack_mm" + ("" if on_gpu else "_for_cpu"))
    theirs: list[Tensor] = []
    reason = ""
    try:
        # On the CPU, torch's 4-bit product takes each code in 32 bits.
        given = codes if on_gpu else torch.randint(0, 15, (size, size), dtype=torch.int32)
        theirs = [convert(given, 8) for _ in several]
    except RuntimeError as error:
        reason = str(error)

    def int4(x: Tensor, i: int) -> Call:
        def call() -> Tensor:
            if reason:
                raise RuntimeError(reason)
            found: Tensor = multiply(x, theirs[i], 128, scales_zeros)
            return found

        return call

    for rows in (1, 4, 16):
        x = _random(device, rows, size)
        times.compare(
            f"awq_gemm, {rows} rows, {size} x {size}",
            [_awq(device, x, weights) for weights in packed],
            {
                "16-bit product": [_product(x, weights) for weights in full],
                "_weight_int4pack_mm": [int4(x, i) for i in several],
            },
            float(one.codes.nbytes + one.scales.nbytes + one.zeros.nbytes),
            2.0 * rows * size * size,
        )


def _awq(device: ContactDevice, x: Tensor, weights: awq_gemm.AwqWeights) -> Call:
    return lambda: awq_gemm.gemm(device.kernels, x, weights)


def _product(x: Tensor, weights: Tensor) -> Call:
    return lambda: x @ weights
