"""4-bit and 8-bit GEMM: the reference's bits in every variant and batch, and accuracy."""

from __future__ import annotations

import itertools

import pytest
import torch
from kvkernels.cpu import cpu_library, quantized_gemm
from torch import Tensor

pytestmark = pytest.mark.skipif(not cpu_library.usable_variants(), reason="no variant of the kernels runs here")
# outputs, inputs, bits, group: one strip, several, groups smaller and larger than a block
LAYERS = [(16, 32, 4, 32), (48, 96, 4, 32), (112, 320, 4, 64), (208, 896, 4, 128), (80, 96, 8, 32), (160, 448, 8, 64),
          (48, 112, 4, 16), (96, 272, 8, 16)]  # fmt: skip


@pytest.fixture(params=cpu_library.usable_variants(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant that this CPU can run."""
    kernel = cpu_library.KernelLibrary(request.param).kernel("quantized_gemm", quantized_gemm._Job)
    monkeypatch.setattr(quantized_gemm, "kernel", lambda: kernel)


def layer(outputs: int, inputs: int, bits: int, group: int) -> quantized_gemm.QuantizedWeight:
    """Return codes, scales and zeros of every magnitude, extremes included."""
    random = torch.Generator().manual_seed(outputs + inputs + bits)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=random, dtype=torch.uint8)
    codes[0], codes[1] = 0, 2**bits - 1
    groups = inputs // group
    scales = torch.exp2(torch.randint(-14, 3, (outputs, groups), generator=random).float()).half()
    zeros = torch.randint(0, 2**bits, (outputs, groups), generator=random).half()
    return quantized_gemm.pack(codes, scales, zeros, bits)


def numbers(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return values of very different magnitudes; the first row has the largest that bytes hold."""
    x = torch.randn(rows, inputs) * torch.exp2(torch.randint(-9, 10, (rows, inputs)).float())
    x[0] = x[0].sign() * 127
    return x.to(dtype)


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_references_in_every_batch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = layer(*shape)
    x, bias = numbers(150, weight.inputs, dtype), torch.randn(weight.outputs).to(dtype)
    want = quantized_gemm.reference(x, weight, bias)
    for rows in (1, 2, 3, 4, 7, 8, 13, 63, 64, 65, 150):
        assert torch.equal(quantized_gemm.gemm(x[:rows], weight, bias), want[:rows]), f"{rows} rows"
        assert torch.equal(quantized_gemm.gemm(x[-rows:], weight, bias), want[-rows:]), f"{rows} rows"
    assert torch.equal(quantized_gemm.gemm(x, weight, None), quantized_gemm.reference(x, weight, None))


def test_rows_of_zeros_give_the_bias_wherever_they_stand() -> None:
    weight, bias = layer(*LAYERS[2]), torch.randn(112)
    x = numbers(70, 320, torch.float32)
    x[3], x[66:] = 0, 0
    got = quantized_gemm.gemm(x, weight, bias)
    assert torch.equal(got, quantized_gemm.reference(x, weight, bias))
    assert torch.equal(got[3], bias)
    assert torch.equal(got[66:], bias.expand(4, -1))
    assert torch.equal(quantized_gemm.gemm(torch.zeros(2, 320), weight, None), torch.zeros(2, 112))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_damage_stays_in_its_row_and_is_seen(bad: float) -> None:
    weight, x = layer(*LAYERS[2]), torch.randn(9, 320)
    want = quantized_gemm.gemm(x, weight, None)
    x[4, 77] = bad
    got = quantized_gemm.gemm(x, weight, None)
    assert not got[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_cost_little_beside_what_bits_do(bits: int) -> None:
    """Error against float64 for normally distributed values, relative to the products."""
    torch.manual_seed(2)
    weight, x = quantized_gemm.quantize(torch.randn(64, 896) * 0.02, bits, 64), torch.randn(40, 896)
    want = x.double() @ quantized_gemm.dequantize(weight).double().t()
    error = (quantized_gemm.gemm(x, weight, None) - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < 0.007


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.1), (8, 0.006)])
def test_quantizing_keeps_weights_near(bits: int, bound: float) -> None:
    torch.manual_seed(3)
    weight = torch.randn(4112, 64) * 0.02  # more than a slice
    weight[5], weight[6], weight[7] = 0, weight[6].abs(), -weight[7].abs()
    near = quantized_gemm.dequantize(quantized_gemm.quantize(weight.bfloat16(), bits, 32))
    assert torch.equal(near[5], torch.zeros(64))
    for some in (slice(None), slice(6, 7), slice(7, 8)):
        assert (near[some] - weight[some]).square().mean().sqrt() < bound * weight[some].square().mean().sqrt()


def test_what_was_packed_can_be_read() -> None:
    for outputs, inputs, bits, group in LAYERS:
        weight = layer(outputs, inputs, bits, group)
        codes, scales, zeros = quantized_gemm.unpack(weight)
        again = quantized_gemm.pack(codes, scales, zeros, bits)
        assert torch.equal(again.data, weight.data)
        assert codes[1].eq(2**bits - 1).all()
    one, other = (quantized_gemm.quantize(torch.randn(n, 64), 4, 32) for n in (16, 48))
    both = quantized_gemm.concatenate([one, other])
    assert torch.equal(
        quantized_gemm.dequantize(both), torch.cat([quantized_gemm.dequantize(one), quantized_gemm.dequantize(other)])
    )


@pytest.mark.parametrize(("outputs", "inputs", "bits", "group"), [(24, 64, 4, 32), (16, 64, 3, 32), (16, 64, 4, 8)])
def test_what_it_does_not_take_is_refused(outputs: int, inputs: int, bits: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"{inputs} x {outputs} at {bits} bits in groups of {group}"):
        quantized_gemm.quantize(torch.randn(outputs, inputs), bits, group)


def test_a_team_of_any_size_gives_the_same() -> None:
    weight, x = layer(*LAYERS[3]), torch.randn(130, 896)
    before = torch.get_num_threads()
    found = []
    for threads, rows in itertools.product((1, 2, 3), (1, 130)):
        torch.set_num_threads(threads)
        found.append(quantized_gemm.gemm(x[:rows], weight, None)[0])
    torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)
