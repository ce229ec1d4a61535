"""Products in float32 with weights at 16 bits: the reference's bits in every variant, batch and width."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kvkernels.cpu import dense, library

pytestmark = pytest.mark.skipif(not library.usable(), reason="no variant of the kernels runs here")
# outputs, inputs: less than a strip, one, several; less than a block of inputs, one, several, and some more
LAYERS = [(7, 20), (32, 128), (70, 300), (328, 320), (96, 640)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 37, 191, 192, 193, 230)


@pytest.fixture(params=library.usable(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant that this CPU can run."""
    kernel = library.Library(request.param).kernel("dense", dense._Job)
    monkeypatch.setattr(dense, "kernel", lambda: kernel)


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("kept", dense.KEPT)
def test_bits_are_the_references_in_every_batch(shape: tuple[int, int], kept: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = dense.pack(torch.randn(shape).to(kept).float())
    assert weight.data.dtype == kept
    assert weight.data.nbytes == dense.size_bytes(shape[1], shape[0], kept)
    x, bias = torch.randn(max(ROWS), shape[1]), torch.randn(shape[0])
    want = dense.reference(x, weight, bias)
    for rows in ROWS:
        assert torch.equal(dense.product(x[:rows], weight, bias), want[:rows]), f"{rows} rows"
        assert torch.equal(dense.product(x[-rows:], weight, bias), want[-rows:]), f"{rows} rows"
    assert torch.equal(dense.product(x, weight, None), dense.reference(x, weight, None))


def test_products_are_as_near_as_torchs() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(64, 4864).bfloat16().float() * 0.02, torch.randn(40, 4864)
    want = x.double() @ weight.double().t()
    ours = (dense.product(x, dense.pack(weight), None) - want).abs().mean()
    assert ours < 2 * (F.linear(x, weight) - want).abs().mean()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damage_stays_in_its_row(bad: float) -> None:
    weight, x = dense.pack(torch.randn(70, 300)), torch.randn(30, 300)
    want = dense.product(x, weight, None)
    x[4, 77] = bad
    got = dense.product(x, weight, None)
    assert not got[4].isfinite().any()
    others = torch.arange(30) != 4
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("kept", dense.KEPT)
def test_a_weight_is_kept_as_narrow_as_it_came(kept: torch.dtype) -> None:
    weight = torch.randn(2100, 40).to(kept).float()  # more than a slice
    weight[2099, 39] = {torch.float32: 1 + 2**-20, torch.bfloat16: 2.0**100, torch.float16: 1 + 2**-10}[kept]
    assert dense.narrowest(weight) == kept
    assert torch.equal(dense.unpack(dense.pack(weight)), weight)


def test_numbers_are_never_rounded() -> None:
    weight = torch.randn(64, 40).bfloat16().float()
    weight[63, 39] = 2.0**-130 + 2.0**-149  # below what 16 bits hold
    assert dense.narrowest(weight) == torch.float32
    assert torch.equal(dense.unpack(dense.pack(weight)), weight)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    weight, x = dense.pack(torch.randn(328, 320)), torch.randn(400, 320)
    want, before = dense.product(x, weight, None), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(dense.product(x, weight, None), want)
    finally:
        torch.set_num_threads(before)
