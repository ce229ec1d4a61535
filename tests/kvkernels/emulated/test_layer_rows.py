"""Row kernels of a decoder layer against transformers' modules."""

import pytest
import torch
import torch.nn.functional as F
from kvkernels.cuda import layer_rows
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from tests.kvkernels.emulated.conftest import SCHEDULES, Emulated, Schedule

DTYPES = (torch.float16, torch.bfloat16)
# One rounding of a result; a value near a boundary may round the other way.
ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_of(width: int, dtype: torch.dtype) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(width, 1e-6).to(dtype)
    norm.weight.data = 1 + random(9, width, dtype=dtype) / 4
    return norm.requires_grad_(False)


def assert_close(got: torch.Tensor, want: torch.Tensor, roundings: int, least: float = 0.125) -> None:
    """Compare with a result of as many roundings; ``least`` is the size of a sum's terms."""
    assert torch.isfinite(got).all()
    limit = roundings * ROUNDING[got.dtype] * want.float().abs().clamp_min(least)
    assert ((got.float() - want.float()).abs() <= limit).all()


@pytest.mark.parametrize("schedule", SCHEDULES[::4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 896, 4096])
@pytest.mark.parametrize("added", [True, False])
def test_a_norm_of_a_sum(emulated: Emulated, schedule: Schedule, dtype: torch.dtype, width: int, added: bool) -> None:
    emulated.schedule(schedule)
    hidden, norm = random(1, 5, width, dtype=dtype), norm_of(width, dtype)
    delta = random(2, 5, width, dtype=dtype) if added else None
    total = hidden if delta is None else hidden + delta
    kept, out = hidden.clone(), torch.full_like(hidden, float("nan"))
    layer_rows.add_norm(emulated, kept, delta, norm.weight.float(), norm.variance_epsilon, out)
    assert torch.equal(kept, total)
    assert_close(out, norm(total), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("normed", [True, False])
def test_rotated_rows_are_in_their_slots(emulated: Emulated, dtype: torch.dtype, dim: int, normed: bool) -> None:
    rows, heads, kv_heads, slots = 6, 7, 2, torch.tensor([11, 3, 8, 0, 15, 4])
    qkv = random(3, rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.arange(rows)[:, None] * 3.0 * 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
    cos, sin = (torch.cat((x, x), -1).to(dtype) for x in (angles.cos(), angles.sin()))
    norms = (norm_of(dim, dtype), norm_of(dim, dtype)) if normed else None
    if norms is not None:
        norms[1].weight.data *= 2
    query, key, value = (x.view(rows, -1, dim) for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    want_q, want_k = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=1)
    queries = torch.full((rows, heads, dim), float("nan"), dtype=dtype)
    keys, values = (torch.full((kv_heads, 20, dim), float("nan"), dtype=dtype) for _ in range(2))
    weights = (None, None) if norms is None else (norms[0].weight.float(), norms[1].weight.float())
    layer_rows.rope(emulated, qkv, (cos, sin), weights, 1e-6, slots, queries, keys, values)
    assert_close(queries, want_q, 4, 1.0)
    assert_close(keys[:, slots].transpose(0, 1), want_k, 4, 1.0)
    assert torch.equal(values[:, slots].transpose(0, 1), value)
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert keys[:, others].isnan().all()
    assert values[:, others].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 8), (3, 4864), (5, 1000)])
def test_gates(emulated: Emulated, dtype: torch.dtype, rows: int, inner: int) -> None:
    gate_up = 4 * random(4, rows, 2 * inner, dtype=dtype)
    out = torch.full((rows, inner), float("nan"), dtype=dtype)
    layer_rows.silu_and_mul(emulated, gate_up, out)
    assert_close(out, F.silu(gate_up[:, :inner]) * gate_up[:, inner:], 2)


def test_which_widths_the_kernels_support() -> None:
    assert layer_rows.supports(896, 4864, 64)
    assert not layer_rows.supports(900, 4864, 64)
    assert not layer_rows.supports(896, 4868, 64)
    assert not layer_rows.supports(896, 4864, 66)
    assert not layer_rows.supports(896, 4864, 512)
