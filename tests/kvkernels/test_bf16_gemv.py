"""BF16 GEMV has oneDNN's bits, or oneDNN computes the product."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from kvkernels.cpu import bf16_gemv as cpu_products
from kvkernels.cpu.bf16_gemv import MAX_ROWS
from torch import Tensor

from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE, in_float32

pytestmark = pytest.mark.skipif(cpu_products.kernel() is None, reason="this CPU has no AVX512-BF16")
SHAPES = [(896, 896), (1152, 896), (896, 4864), (2048, 2048), (512, 64), (320, 320), (4096, 448)]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    cpu_products._block.cache_clear()
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def wide(*shape: int) -> Tensor:
    """Return values of very different magnitudes, whose sums depend on the order."""
    return (torch.randn(*shape) * torch.exp2(torch.randint(-12, 13, shape).float())).bfloat16()


def by_onednn(layer: PackedLinear, x: Tensor) -> Tensor:
    """Pad the rows: oneDNN may compute other bits for a number of rows that is no multiple of ROW_MULTIPLE."""
    return layer.by_onednn(F.pad(x, (0, 0, 0, -len(x) % ROW_MULTIPLE)))[: len(x)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bits_are_those_of_one_dnn(outputs: int, inputs: int, biased: bool) -> None:
    torch.manual_seed(outputs + inputs)
    layer = PackedLinear(wide(outputs, inputs), wide(outputs) if biased else None)
    for rows in range(1, MAX_ROWS + 1):
        x = wide(rows, inputs)
        assert torch.equal(layer(x), by_onednn(layer, x)), f"{rows} rows"
    assert layer._streamed is not None, "all is right, and as slow as before"


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16, 64])
@pytest.mark.parametrize("outputs", [64, 192, 576, 960])
def test_narrow_products_are_divided_within_strips(outputs: int, threads: int) -> None:
    """Otherwise a model with narrow layers would have no CPU graph on a machine with many cores."""
    torch.manual_seed(outputs + threads)
    layer = PackedLinear(wide(outputs, 192), wide(outputs))
    inputs = [wide(rows, 192) for rows in (1, 4, 7, 12, MAX_ROWS)]
    expected = [by_onednn(layer, x) for x in inputs]
    torch.set_num_threads(threads)
    for x, bits in zip(inputs, expected, strict=True):
        assert torch.equal(layer(x), bits), f"{len(x)} rows"
    assert layer._streamed is not None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (100, 64)])
def test_results_in_float32_are_those_before_rounding(outputs: int, inputs: int, biased: bool) -> None:
    """Also for more than MAX_ROWS, which oneDNN computes else."""
    torch.manual_seed(outputs + inputs)
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16() if biased else None
    layer, x = PackedLinear(weight, bias), torch.randn(2 * MAX_ROWS + 3, inputs).bfloat16()
    whole = in_float32(layer, x)
    assert whole.dtype == torch.float32
    assert torch.equal(whole.bfloat16(), layer.by_onednn(x))
    for rows in (1, 4, 5, MAX_ROWS):
        assert torch.equal(in_float32(layer, x[:rows]), whole[:rows]), f"{rows} rows"
    if layer._streamed is not None:
        exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        assert (whole - exact).abs().max() < 1e-6 * inputs
        assert not torch.equal(whole, whole.bfloat16().float())
    else:
        assert outputs == 100


def test_what_it_does_not_serve_one_dnn_does() -> None:
    for outputs, inputs, rows in (
        (192, 100, 4),
        (448, 1090, 4),
        (100, 64, 4),
        (512, 64, MAX_ROWS + 4),
    ):
        layer, x = PackedLinear(wide(outputs, inputs), None), wide(rows, inputs)
        assert torch.equal(layer(x), layer.by_onednn(x))
    layer = PackedLinear(wide(512, 64), None)
    x = wide(64, 8).T
    assert torch.equal(layer(x), layer.by_onednn(x.contiguous())), "strided input"
    x = wide(2, 4, 64)
    assert torch.equal(layer(x), layer.by_onednn(x)), "more than two dimensions"


def test_another_order_of_sums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "_BLOCKS", (256,))  # oneDNN's is 512 here
    layer, x = PackedLinear(wide(512, 896), None), wide(4, 896)
    assert torch.equal(layer(x), layer.by_onednn(x))
    assert layer._streamed is None


def test_the_comparison_tells_all_orders_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for inputs, right in ((320, 320), (896, 512), (2048, 1024)):
        for wrong in range(64, inputs + 1, 64):
            monkeypatch.setattr(cpu_products, "_BLOCKS", (wrong,))
            cpu_products._block.cache_clear()
            assert cpu_products._block(512, inputs, False, 2) in ({right} if wrong == right or inputs == right else {0})


def test_threads_may_share_a_product() -> None:
    layer = PackedLinear(wide(1152, 896), wide(1152))
    inputs = [wide(8, 896) for _ in range(40)]
    layer(inputs[0])

    def one(x: Tensor) -> bool:
        with torch.inference_mode():
            return all(torch.equal(layer(x), layer.by_onednn(x)) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, inputs))
