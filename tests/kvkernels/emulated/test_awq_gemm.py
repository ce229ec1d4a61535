"""W4A16 GEMM against AutoAWQ's format by definition."""

import pytest
import torch
from kvkernels import awq_layout
from kvkernels.cuda import awq_gemm

from tests.kvkernels.emulated.conftest import Emulated
from tests.kvkernels.emulated.oracle import TOLERANCE


def layer(inputs: int, outputs: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random weights in AutoAWQ's GEMM format."""
    g = torch.Generator().manual_seed(inputs + outputs + group)
    words = torch.randint(-(2**31), 2**31, (inputs, outputs // 8), generator=g).to(torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (inputs // group, outputs // 8), generator=g).to(torch.int32)
    return words, zeros, (torch.rand(inputs // group, outputs, generator=g) * 0.02 + 0.001).to(dtype)


def test_a_word_holds_columns_in_autoawq_s_order() -> None:
    word = sum(column << 4 * nibble for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    assert awq_layout.unpack_columns(torch.tensor([[word]], dtype=torch.int64).to(torch.int32)).tolist() == [
        list(range(8))
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", awq_gemm.GROUPS)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 64), (384, 192)])
def test_repacked_weights_are_the_same_weights(
    emulated: Emulated, dtype: torch.dtype, group: int, inputs: int, outputs: int
) -> None:
    words, zeros, scales = layer(inputs, outputs, group, dtype)
    got = awq_gemm.dequantize(emulated, awq_gemm.repack(words, zeros, scales))
    assert torch.equal(got, awq_layout.reference_weight(words, zeros, scales))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", awq_gemm.GROUPS)
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40])
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_products_equal_those_in_float64(
    emulated: Emulated, dtype: torch.dtype, group: int, rows: int, splits: int | None
) -> None:
    words, zeros, scales = layer(640, 128, group, dtype)
    x = torch.randn(rows, 640, generator=torch.Generator().manual_seed(rows)).to(dtype)
    got = awq_gemm.gemm(emulated, x, awq_gemm.repack(words, zeros, scales), splits)
    expected = x.double() @ awq_layout.reference_weight(words, zeros, scales).double().t()
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype]


def test_volta_multiplies_as_well(volta: Emulated) -> None:
    words, zeros, scales = layer(256, 64, 128, torch.float16)
    x = torch.randn(5, 256).half()
    expected = x.double() @ awq_layout.reference_weight(words, zeros, scales).double().t()
    got = awq_gemm.gemm(volta, x, awq_gemm.repack(words, zeros, scales), 2)
    assert (got.double() - expected).abs().max() / expected.abs().max() <= 1e-3


@pytest.mark.parametrize(("inputs", "outputs", "group"), [(128, 72, 64), (128, 64, 16)])
def test_layers_that_do_not_fit_are_refused_by_name(inputs: int, outputs: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"the layer is {inputs} x {outputs} in groups of {group}"):
        awq_gemm.repack(*layer(inputs, outputs, group, torch.float16))
