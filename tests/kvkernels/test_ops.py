"""Custom operators: torch's opcheck, and equality of reference and kernels."""

import pytest
import torch
from kvkernels import awq_layout, ops
from kvkernels.cuda import awq_gemm
from kvkernels.cuda.cuda_attention import AttentionRows, PagedKV, attend

from tests.kvkernels.doubles.card import T4
from tests.kvkernels.emulated.conftest import Emulated, library
from tests.kvkernels.emulated.oracle import int32
from tests.kvkernels.emulated.test_awq_gemm import layer

Arguments = tuple[torch.Tensor | int | float, ...]


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return library()


def attention_arguments(window: int, softcap: float) -> Arguments:
    g = torch.Generator().manual_seed(0)
    query = torch.randn(12, 4, 64, generator=g).half()
    keys, values = (torch.randn(2, 200, 64, generator=g).half() for _ in range(2))
    slots = torch.stack([torch.randperm(200, generator=g)[:90] for _ in range(2)]).to(torch.int32)
    positions = torch.cat((torch.arange(82, 90), torch.tensor([0, 7, 20, 39]))).to(torch.int32)
    return query, keys, values, int32(0, 8, 12), int32(90, 40), positions, slots, 8, 90, 0.125, window, softcap


def awq_arguments() -> Arguments:
    packed = awq_gemm.repack(*layer(128, 64, 64, torch.float16))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).half()
    return x, packed.codes, packed.scales, packed.zeros, packed.group


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (16, 30.0)])
def test_torch_accepts_the_operators(window: int, softcap: float) -> None:
    torch.library.opcheck(ops.attention, attention_arguments(window, softcap))
    torch.library.opcheck(ops.awq_gemm, awq_arguments())


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (16, 30.0)])
def test_reference_and_kernel_attend_alike(emulated: Emulated, window: int, softcap: float) -> None:
    given = attention_arguments(window, softcap)
    query, keys, values, qo_indptr, kv_lens, positions, slots, max_q_len, max_kv_len, scale, *_ = given
    rows = AttentionRows(qo_indptr, kv_lens, positions, max_q_len, max_kv_len)
    ours = attend(emulated, query, PagedKV(keys, values, pages=slots), rows, scale, window, softcap)
    output, lse = ops.attention(*given)
    assert (ours[0].float() - output.float()).abs().max() < 2e-3
    assert (ours[1] - lse).abs().max() < 1e-4


def test_reference_and_kernel_multiply_alike(emulated: Emulated) -> None:
    words = layer(128, 64, 64, torch.float16)
    packed = awq_gemm.repack(*words)
    assert torch.equal(awq_gemm.dequantize_reference(packed), awq_layout.reference_weight(*words))
    x, *_ = awq_arguments()
    assert isinstance(x, torch.Tensor)
    product = ops.awq_gemm(*awq_arguments())
    assert (awq_gemm.gemm(emulated, x, packed).float() - product.float()).abs().max() <= 2e-3 * product.abs().max()


def test_attention_beyond_a_cards_shared_memory_is_torchs(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "find_kernels", lambda device, dtype: emulated)
    monkeypatch.setattr(ops, "fits", lambda device, kernel, shared_bytes: shared_bytes <= T4.shared_bytes)
    assert ops.find_attention_kernels(torch.device("cpu"), torch.float16, 256) is None
    assert ops.find_attention_kernels(torch.device("cpu"), torch.float16, 128) is emulated
