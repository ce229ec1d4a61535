"""Errors of every kernel, dtype and head dimension against float64.

Before a kernel runs, memory that torch allocates is filled with NaN, and payloads are filled with 0xaa. So a value that
the kernel does not write is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from kvkernels import awq_layout, kv_pack_reference
from kvkernels.cuda import awq_gemm, cuda_kv_pack, layer_rows
from kvkernels.cuda.cuda_attention import HEAD_DIMS, AttentionRows, PagedKV, attend, combine, shared_bytes
from kvkernels.cuda.kernel_select import fits, supports
from kvkernels.cuda.piece_table import PieceTable, TablePiece, sections_at
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT16, ChunkHeader
from kvsidecar.chunk_layout import Geometry, layout_of, new_header
from torch import Tensor

from benchmarks.first_contact.contact_device import ContactDevice, GpuDevice
from benchmarks.first_contact.row import RowFile
from tests.kvkernels.emulated.oracle import TOLERANCE, Case, attention, cascade, int32

STORED = {torch.float16: DATA_TYPE_FLOAT16, torch.bfloat16: DATA_TYPE_BFLOAT16}
_PACKED_DIMS = (64, 80, 96, 128, 256)
_LSE_TOLERANCE = 1e-4  # the GPU's exp2 and log2 are approximations
_LAYERS, _POOL = 3, 200
_RAGGED = ((3, 130), (1, 64), (40, 40), (17, 129))


class Poison:
    """Fills uninitialized memory with NaN while the ``with`` block runs."""

    def __enter__(self) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


def check_kernels(device: ContactDevice, rows: RowFile) -> None:
    """Check all kernels. A kernel that raises is a failed row."""
    with Poison():
        for dtype in STORED:
            if isinstance(device, GpuDevice) and not supports(device.torch, dtype):
                rows.measured(f"{_name(dtype)}", "this card has none; torch computes")
                continue
            for dim in HEAD_DIMS:
                if isinstance(device, GpuDevice) and not fits(device.torch, f"attention of {dim}", shared_bytes(dim)):
                    rows.measured(f"attention {_name(dtype)} {dim}", "more shared memory than the card has")
                    continue
                _row(rows, f"attention {_name(dtype)} {dim}", TOLERANCE[dtype], _attention, device, dtype, dim)
                case = f"attention over a shared prefix {_name(dtype)} {dim}"
                _row(rows, case, TOLERANCE[dtype], _cascade, device, dtype, dim)
                _row(rows, f"combine {_name(dtype)} {dim}", TOLERANCE[dtype], _combined, device, dtype, dim)
            for bits, dim in product((16, 8, 4), _PACKED_DIMS):
                # Packing always has an error of up to half a quantization step. Unpacking also rounds to the dtype.
                limit = 0.0 if bits == 16 else 0.51
                _row(rows, f"pack {bits} bits {_name(dtype)} {dim}", limit, _packed, device, dtype, dim, bits)
                case = f"unpack {bits} bits {_name(dtype)} {dim}"
                _row(rows, case, TOLERANCE[dtype], _unpacked, device, dtype, dim, bits)
            for check in (_norms, _rotations, _gates):
                _row(rows, f"layer's {check.__name__[1:]} {_name(dtype)}", TOLERANCE[dtype], check, device, dtype)
            for group in awq_gemm.GROUPS:
                case = f"awq_gemm {_name(dtype)} group {group}"
                _row(rows, case, TOLERANCE[dtype], _awq_products, device, dtype, group)
                _row(rows, f"awq_dequantize {_name(dtype)} group {group}", 0.0, _awq_weights, device, dtype, group)


def check_few_kernels(device: ContactDevice, rows: RowFile) -> None:
    """Check one case of each kernel, for a memory checker that makes kernels slow."""
    dtype, dim = torch.float16, 64
    tolerance = TOLERANCE[dtype]
    with Poison():
        _row(rows, "attention", tolerance, _attention, device, dtype, dim)
        _row(rows, "attention over a shared prefix", tolerance, _cascade, device, dtype, dim)
        _row(rows, "pack", 0.51, _packed, device, dtype, dim, 8)
        _row(rows, "unpack", tolerance, _unpacked, device, dtype, dim, 8)
        _row(rows, "awq_gemm", tolerance, _awq_products, device, dtype, 64)


def _row(rows: RowFile, case: str, limit: float, check: Callable[..., float], *arguments: object) -> None:
    try:
        error = check(*arguments)
    except Exception as refused:
        rows.raised(case, refused)
    else:
        rows.within(case, error, limit)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest(*errors: float) -> float:
    """Return the largest error; NaN if one is NaN, which Python's ``max`` may ignore."""
    return float(np.max(np.asarray(errors)))


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest expected value or 1, whichever is larger.

    The result is NaN if any difference is NaN.
    """
    wanted = expected.double().cpu()
    scale = max(1.0, float(wanted.abs().max()))
    return float((got.double().cpu() - wanted).abs().max()) / scale


def _judged(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> float:
    """Return the larger error of output and log-sum-exp. The latter is scaled, because its tolerance differs."""
    lse, wanted = got[1].double().cpu(), expected[1].double()
    seen = torch.isfinite(wanted)
    if not torch.equal(seen, torch.isfinite(lse)):
        return float("nan")
    error = float((lse - wanted)[seen].abs().max()) if seen.any() else 0.0
    return largest(relative(got[0], expected[0]), error / _LSE_TOLERANCE * tolerance)


def _rows_on(case: Case, device: ContactDevice) -> AttentionRows:
    at, place = case.rows(), device.torch
    positions = None if at.positions is None else at.positions.to(place)
    return AttentionRows(at.qo_indptr.to(place), at.kv_lens.to(place), positions, at.max_q_len, at.max_kv_len)


def _attention(device: ContactDevice, dtype: torch.dtype, dim: int) -> float:
    """Return the largest error over ragged, decoding, scattered, paged, split, windowed and capped batches."""
    several = (
        (Case(_RAGGED, 8, 2, dim, dtype), None, 0, 0, 0.0),
        (Case(((1, 300), (1, 33)), 7, 1, dim, dtype), 5, 0, 0, 0.0),
        (Case(((40, 200), (5, 70)), 4, 2, dim, dtype, scattered=True), 2, 16, 0, 0.0),
        (Case(((20, 150),), 4, 4, dim, dtype), 1, 0, 50, 20.0),
    )
    return largest(*(_pool_attention(device, *one) for one in several))


def _pool_attention(
    device: ContactDevice, case: Case, splits: int | None, page_tokens: int, window: int, softcap: float
) -> float:
    step = max(page_tokens, 1)
    lengths = [-(-count // step) * step for _, count in case.sequences]
    first = [5 * step + sum(lengths[:i]) for i in range(len(lengths))]
    keys, values = case.keys_values(first[-1] + lengths[-1] + 64)
    place, query = device.torch, case.query()
    source = PagedKV(keys.to(place), values.to(place), first_slot=int32(*first).to(place))
    if page_tokens:
        most = max(lengths) // step
        pages = torch.zeros(len(lengths), most, dtype=torch.int32)
        for line, start, length in zip(pages, first, lengths, strict=True):
            line[: length // step] = torch.arange(start // step, (start + length) // step)
        source = PagedKV(keys.to(place), values.to(place), pages=pages.to(place), page_tokens=page_tokens)
    scale = case.dim**-0.5
    got = attend(device.kernels, query.to(place), source, _rows_on(case, device), scale, window, softcap, splits)
    parts, row = [], 0
    for (count, length), start, positions in zip(case.sequences, first, case.positions(), strict=True):
        held = (x[:, start : start + length] for x in (keys, values))
        parts.append(attention(query[row : row + count], *held, positions, scale, window, softcap))
        row += count
    expected = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    return _judged(got, expected, TOLERANCE[case.dtype])


def _cascade(device: ContactDevice, dtype: torch.dtype, dim: int) -> float:
    """Return the largest error over decoding and ragged batches in which all sequences but the last share a prefix."""
    several = Case(((1, 1), (1, 300), (1, 33)), 7, 1, dim, dtype), Case(_RAGGED, 8, 2, dim, dtype)
    found = [cascade(device.kernels, case, 700, len(case.sequences) - 1, place=device.torch) for case in several]
    return largest(*(_judged(got, expected, TOLERANCE[dtype]) for got, expected in found))


def _combined(device: ContactDevice, dtype: torch.dtype, dim: int) -> float:
    generator = torch.Generator().manual_seed(dim)
    parts, weights = torch.randn(5, 7, 4, dim, generator=generator), 3 * torch.randn(5, 7, 4, generator=generator)
    weights[1:3, 2] = float("-inf")
    output = torch.empty(7, 4, dim, dtype=dtype, device=device.torch)
    lse = torch.empty(7, 4, device=device.torch)
    got = combine(device.kernels, parts.to(device.torch), weights.to(device.torch), output, lse)
    shares = torch.softmax(weights.double(), 0)
    return _judged(got, ((parts.double() * shares[..., None]).sum(0), weights.double().logsumexp(0)), TOLERANCE[dtype])


def _header(dtype: torch.dtype, dim: int, bits: int, tokens: int, layers: int, kv_heads: int) -> ChunkHeader:
    return new_header(Geometry(layers, kv_heads, dim, STORED[dtype], bits), list(range(tokens)), 0)


def _pool(dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    keys, values = (torch.randn(_LAYERS, 2, _POOL, dim, generator=generator) for _ in range(2))
    keys[..., 5] *= 40
    values[:, :, 17] *= 20
    return keys.to(dtype), values.to(dtype)


def _slots(tokens: int) -> Tensor:
    return torch.randperm(_POOL, generator=torch.Generator().manual_seed(1))[:tokens]


def _packed(device: ContactDevice, dtype: torch.dtype, dim: int, bits: int) -> float:
    """Return the largest error of packing, in quantization steps; for unquantized values, the absolute error."""
    errors = []
    for tokens in (70, 33, 2):
        keys, values = _pool(dtype, dim)
        header, place = _header(dtype, dim, bits, tokens, _LAYERS, 2), device.torch
        payload = torch.full((header.payload_bytes,), 0xAA, dtype=torch.uint8, device=place)
        slots = _slots(tokens)
        table = PieceTable([TablePiece(header, slots, range(_LAYERS), sections_at(header))], packs=True)
        there = table.to(place)
        cuda_kv_pack.pack(device.kernels, keys.to(place), values.to(place), table, there.data_ptr(), payload.data_ptr())
        arrays = layout_of(header).arrays(memoryview(payload.cpu().numpy()))
        for source, name in ((keys, "key"), (values, "value")):
            exact = source[:, :, slots].transpose(1, 2).double()  # [layers, tokens, heads, dim]
            errors.append(_steps_off(exact, arrays, name, header, dtype))
    return largest(*errors)


def _steps_off(
    exact: Tensor, arrays: kv_pack_reference.Arrays, name: str, header: ChunkHeader, dtype: torch.dtype
) -> float:
    if header.bits == 16:
        return float((_plain(arrays[f"{name}s"], dtype).double() - exact).abs().max())
    sinks = header.sink_tokens
    unquantized = _plain(arrays[f"sink_{name}s"], dtype).double() - exact[:, :sinks]
    codes = torch.from_numpy(arrays[f"{name}s"].copy())
    if header.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    scale, zero = (torch.from_numpy(arrays[f"{name}_{part}"].copy()).double() for part in ("scale", "zero"))
    if name == "key":
        group = torch.arange(exact.shape[1]) // header.key_group_tokens
        scale, zero = scale[:, group], zero[:, group]
    else:
        scale, zero = scale[..., None], zero[..., None]
    # Sink tokens are stored without quantization, so their codes do not count.
    off = ((codes.double() * scale + zero - exact).abs() / scale.clamp_min(1e-30))[:, sinks:]
    parts = [x.abs().max() for x in (off, unquantized) if x.numel()]
    return largest(*map(float, parts))


def _plain(array: np.ndarray, dtype: torch.dtype) -> Tensor:  # type: ignore[type-arg]
    return torch.from_numpy(array.copy()).view(dtype)


def _unpacked(device: ContactDevice, dtype: torch.dtype, dim: int, bits: int) -> float:
    """Return the largest error of unpacking, with and without a RoPE shift. Other slots must keep their NaN."""
    header, place, slots = _header(dtype, dim, bits, 70, _LAYERS, 2), device.torch, _slots(50)
    payload = bytearray(header.payload_bytes)
    arrays = layout_of(header).arrays(memoryview(payload))
    kv_pack_reference.pack(*_pool(dtype, dim), torch.arange(70), header, arrays)
    angles = np.random.default_rng(0).normal(size=dim // 2).astype(np.float32)
    turn = np.cos(angles), np.sin(angles)
    errors = []
    for rotation, layers in ((turn, range(_LAYERS)), (None, range(1, 2))):
        mine, theirs = (tuple(torch.full_like(x, float("nan")) for x in _pool(dtype, dim)) for _ in range(2))
        ours, sent = tuple(x.to(place) for x in mine), torch.frombuffer(payload, dtype=torch.uint8).to(place)
        table = PieceTable([TablePiece(header, slots, layers, sections_at(header), rotation)])
        there = table.to(place)
        cuda_kv_pack.unpack(device.kernels, *ours, table, there.data_ptr(), sent.data_ptr())
        kv_pack_reference.unpack(*theirs, slots, header, arrays, rotation, layers)
        for got, expected in zip((x.cpu() for x in ours), theirs, strict=True):
            written = torch.isfinite(expected)
            same = torch.equal(written, torch.isfinite(got))
            errors.append(relative(got[written], expected[written]) if same else float("nan"))
    return largest(*errors)


def _awq(dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group)
    words, zeros = (
        torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        for shape in ((640, 192 // 8), (640 // group, 192 // 8))
    )
    return words, zeros, (torch.rand(640 // group, 192, generator=generator) * 0.02 + 0.001).to(dtype)


def _repacked(device: ContactDevice, layer: Sequence[Tensor]) -> awq_gemm.AwqWeights:
    words, zeros, scales = (x.to(device.torch) for x in layer)
    return awq_gemm.repack(words, zeros, scales)


def _awq_products(device: ContactDevice, dtype: torch.dtype, group: int) -> float:
    layer = _awq(dtype, group)
    packed, weight, errors = _repacked(device, layer), awq_layout.reference_weight(*layer).double(), []
    for rows, splits in ((1, None), (3, 3), (8, 1), (16, 2), (40, None)):
        x = torch.randn(rows, 640, generator=torch.Generator().manual_seed(rows)).to(dtype)
        got = awq_gemm.gemm(device.kernels, x.to(device.torch), packed, splits)
        errors.append(relative(got, x.double() @ weight.t()))
    return largest(*errors)


def _awq_weights(device: ContactDevice, dtype: torch.dtype, group: int) -> float:
    layer = _awq(dtype, group)
    return relative(awq_gemm.dequantize(device.kernels, _repacked(device, layer)), awq_layout.reference_weight(*layer))


def _random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _norms(device: ContactDevice, dtype: torch.dtype) -> float:
    errors = []
    for width in (64, 896, 4096):
        hidden, delta, weight = (
            _random(i, dtype, *shape) for i, shape in enumerate(((5, width), (5, width), (width,)))
        )
        kept, out = hidden.to(device.torch, copy=True), torch.empty_like(hidden, device=device.torch)
        layer_rows.add_norm(device.kernels, kept, delta.to(device.torch), weight.float().to(device.torch), 1e-6, out)
        total = (hidden + delta).double()
        wanted = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        errors += [relative(out, wanted), relative(kept, total)]
    return largest(*errors)


def _rotations(device: ContactDevice, dtype: torch.dtype) -> float:
    """Return the largest error of rotated queries and stored keys and values, with norms of the heads and without."""
    errors, heads, kv_heads, rows, slots = [], 7, 2, 6, _slots(6)
    for dim in _PACKED_DIMS:
        qkv = _random(dim, dtype, rows, heads + 2 * kv_heads, dim)
        angles = _random(1, torch.float32, rows, dim // 2).repeat(1, 2)
        cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
        norm = _random(2, dtype, dim)
        for normed in (False, True):
            exact = qkv.double()
            if normed:
                scale = (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
                exact = torch.cat(((exact * scale * norm.double())[:, :-kv_heads], exact[:, -kv_heads:]), 1)
            turned = torch.cat((-exact[..., dim // 2 :], exact[..., : dim // 2]), -1)
            rotated = exact * cosine.double()[:, None] + turned * sine.double()[:, None]
            queries = torch.empty(rows, heads, dim, dtype=dtype, device=device.torch)
            keys, values = (torch.empty(kv_heads, _POOL, dim, dtype=dtype, device=device.torch) for _ in range(2))
            weight = norm.float().to(device.torch) if normed else None
            layer_rows.rope(
                device.kernels,
                qkv.flatten(1).to(device.torch),
                (cosine.to(device.torch), sine.to(device.torch)),
                (weight, weight),
                1e-6,
                slots.to(device.torch),
                queries,
                keys,
                values,
            )
            errors.append(relative(queries, rotated[:, :heads]))
            errors.append(relative(keys.cpu()[:, slots].transpose(0, 1), rotated[:, heads:-kv_heads]))
            errors.append(relative(values.cpu()[:, slots].transpose(0, 1), exact[:, -kv_heads:]))
    return largest(*errors)


def _gates(device: ContactDevice, dtype: torch.dtype) -> float:
    gate_up = 4 * _random(0, dtype, 3, 2 * 4864)
    out = torch.empty(3, 4864, dtype=dtype, device=device.torch)
    layer_rows.silu_and_mul(device.kernels, gate_up.to(device.torch), out)
    gate, up = gate_up.double().chunk(2, -1)
    return relative(out, torch.nn.functional.silu(gate) * up)
