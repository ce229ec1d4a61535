"""Float32 GEMM: the reference's bits in every variant, batch and storage format."""

from __future__ import annotations

import gguf
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from kvkernels.cpu import code_recovery, cpu_library, f32_gemm

pytestmark = pytest.mark.skipif(not cpu_library.usable_variants(), reason="no variant of the kernels runs here")
# outputs, inputs: less than a strip, one, several; less than a block of inputs, one, several, and more than a span
LAYERS = [(7, 20), (32, 128), (70, 300), (328, 320), (96, 640), (40, 1300)]
NUMBERS = ("float32", "bfloat16", "float16")
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 24, 28, 37, 95, 96, 97, 191, 192, 193, 230, 264, 265, 529)


@pytest.fixture(params=cpu_library.usable_variants(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant that this CPU can run."""
    kernels = cpu_library.KernelLibrary(request.param)
    product, looking = kernels.kernel("f32_gemm", f32_gemm._Job), kernels.kernel("code_recovery", code_recovery._Job)
    monkeypatch.setattr(f32_gemm, "kernel", lambda: product)
    monkeypatch.setattr(code_recovery, "kernel", lambda: looking)


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("kept", NUMBERS)
def test_bits_are_the_references_in_every_batch(shape: tuple[int, int], kept: str) -> None:
    torch.manual_seed(1)
    weight = f32_gemm.pack(torch.randn(shape).to(getattr(torch, kept)).float())
    assert weight.storage == kept
    assert weight.data.nbytes == f32_gemm.size_bytes(shape[1], shape[0], kept)
    x, bias = torch.randn(max(ROWS), shape[1]), torch.randn(shape[0])
    want = f32_gemm.reference(x, weight, bias)
    for rows in ROWS:
        assert torch.equal(f32_gemm.gemm(x[:rows], weight, bias), want[:rows]), f"{rows} rows"
        assert torch.equal(f32_gemm.gemm(x[-rows:], weight, bias), want[-rows:]), f"{rows} rows"
    assert torch.equal(f32_gemm.gemm(x, weight, None), f32_gemm.reference(x, weight, None))


def test_products_are_as_near_as_torchs() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(64, 4864).bfloat16().float() * 0.02, torch.randn(40, 4864)
    want = x.double() @ weight.double().t()
    ours = (f32_gemm.gemm(x, f32_gemm.pack(weight), None) - want).abs().mean()
    assert ours < 2 * (F.linear(x, weight) - want).abs().mean()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damage_stays_in_its_row(bad: float) -> None:
    weight, x = f32_gemm.pack(torch.randn(70, 300)), torch.randn(30, 300)
    want = f32_gemm.gemm(x, weight, None)
    x[4, 77] = bad
    got = f32_gemm.gemm(x, weight, None)
    assert not got[4].isfinite().any()
    others = torch.arange(30) != 4
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("kept", NUMBERS)
def test_a_weight_is_kept_as_narrow_as_it_came(kept: str) -> None:
    weight = torch.randn(2100, 40).to(getattr(torch, kept)).float()  # more than a slice
    weight[2099, 39] = {"float32": 1 + 2**-20, "bfloat16": 2.0**100, "float16": 1 + 2**-10}[kept]
    assert f32_gemm.narrowest_storage(weight) == kept
    assert torch.equal(f32_gemm.unpack(f32_gemm.pack(weight)), weight)


def test_numbers_are_never_rounded() -> None:
    weight = torch.randn(64, 40).bfloat16().float()
    weight[63, 39] = 2.0**-130 + 2.0**-149  # below what 16 bits hold
    assert f32_gemm.narrowest_storage(weight) == "float32"
    assert torch.equal(f32_gemm.unpack(f32_gemm.pack(weight)), weight)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    weight, x = f32_gemm.pack(torch.randn(328, 320)), torch.randn(400, 320)
    want, before = f32_gemm.gemm(x, weight, None), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(f32_gemm.gemm(x, weight, None), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(70, 320), (33, 32), (2100, 64)])
def test_what_was_quantized_is_kept_as_its_codes(kind: str, shape: tuple[int, int]) -> None:
    weight = written_out(torch.randn(shape), kind)
    weight[3] = weight[5] = 0
    packed = f32_gemm.pack(weight)
    assert packed.storage == ("coded4" if kind.startswith("Q4") else "coded8")
    assert torch.equal(f32_gemm.unpack(packed), weight), "not one number is rounded"
    assert packed.data.nbytes == f32_gemm.size_bytes(shape[1], shape[0], packed.storage)
    again = f32_gemm.of_bytes(packed.data.view(-1), *reversed(shape), packed.storage)
    x, bias = torch.randn(max(ROWS), shape[1]), torch.randn(shape[0])
    want = f32_gemm.gemm(x, f32_gemm.pack(weight, "float32"), bias)
    for rows in ROWS:
        assert torch.equal(f32_gemm.gemm(x[:rows], again, bias), want[:rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", KINDS)
def test_the_scales_are_found_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate is a pass over the weight; a group without a match is retried for each."""
    monkeypatch.setattr(code_recovery, "_SAMPLED_GROUPS", 16)
    weight = written_out(torch.randn(1030, 256), kind)
    found = code_recovery.recover_codes(weight)
    assert found is not None
    passed = sum((1 + number) * groups for number, groups in enumerate(found.match_counts))
    assert passed < 1.5 * weight.numel() / code_recovery.GROUP


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", [*KINDS, "several"])
def test_what_is_found_is_what_plain_torch_finds(kind: str, bits: int) -> None:
    """Same codes, scales and bases by the same candidates as the torch reference, or none."""
    weight = torch.cat([written_out(torch.randn(130, 64), k) for k in (KINDS if kind == "several" else (kind,))])
    weight[3] = weight[5] = 0
    weight[7] = (torch.arange(64) % 16 - 8) * 3 * 2.0**-24  # a scale below the smallest normal half
    want, got = (
        look(weight, bits, code_recovery._CANDIDATES[bits])
        for look in (code_recovery.reference, code_recovery._recover)
    )
    if bits == 4 and not kind.startswith("Q4"):
        assert want is None
        assert got is None
        return
    assert want is not None
    assert got is not None
    assert got.match_counts == want.match_counts
    assert torch.equal(got.data, want.data)
    assert torch.equal(code_recovery.dequantize(code_recovery.unpack(got.data, 64, bits))[: len(weight)], weight + 0.0)


@pytest.mark.parametrize(("steps", "zero", "kept"), [(7, 8, "coded4"), (15, 16, "coded8")])
def test_scales_that_an_importance_matrix_made_smaller_are_found_too(steps: int, zero: int, kept: str) -> None:
    """llama.cpp's quantizer with an importance matrix (``make_qx_quants``) may shrink the scale by one step."""
    drawn = torch.randint(zero - steps, zero + steps + 1, (64, 8, code_recovery.GROUP))
    drawn[:, :, 0] = zero - steps
    scales = torch.rand(64, 8, 1).half().float()
    weight = ((drawn - zero) * scales).view(64, -1)
    packed = f32_gemm.pack(weight)
    assert packed.storage == kept
    assert torch.equal(f32_gemm.unpack(packed), weight + 0.0)


def test_what_is_joined_of_codes_of_4_and_8_bits_is_kept_at_8() -> None:
    weight = torch.cat([written_out(torch.randn(64, 64), kind) for kind in ("Q4_0", "Q8_0", "Q4_1")])
    packed = f32_gemm.pack(weight)
    assert packed.storage == "coded8"
    assert torch.equal(f32_gemm.unpack(packed), weight + 0.0)


def test_one_number_without_a_code_keeps_them_all_wide() -> None:
    weight = written_out(torch.randn(2100, 64), "Q4_1")
    weight[2099, 63] = weight[2099, 63].nextafter(torch.tensor(1.0))
    packed = f32_gemm.pack(weight)
    assert packed.storage == "float32"
    assert torch.equal(f32_gemm.unpack(packed), weight)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
def test_numbers_beyond_all_codes_stay_themselves(number: float) -> None:
    weight = written_out(torch.randn(64, 64), "Q4_0")
    weight[40, 7] = number
    assert torch.equal(f32_gemm.unpack(f32_gemm.pack(weight)).nan_to_num(7), weight.nan_to_num(7))


def written_out(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a weight dequantized from its GGUF file by ggml's own reference."""
    kinds = GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kinds), kinds))
