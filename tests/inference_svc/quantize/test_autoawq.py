"""AutoAWQ as the oracle of quantization: ``make test-autoawq`` installs it beside the transformers that it needs."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_svc.quantize.awq_rounding import quantize_weight
from inference_svc.quantize.scale_search import InputStats, best_scale

GROUP, BITS = 64, 4
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that it is no longer maintained
    gemm: Any = pytest.importorskip(
        "awq.modules.linear.gemm", reason="AutoAWQ is not here; make test-autoawq runs it", exc_type=ImportError
    )
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm


@pytest.fixture
def quantizer() -> Any:
    """AutoAWQ's quantizer without a model: its methods on single layers need only these settings."""
    made = AwqQuantizer.__new__(AwqQuantizer)
    made.__dict__.update(
        w_bit=BITS,
        group_size=GROUP,
        zero_point=True,
        duo_scaling=True,
        n_parallel_calib_samples=None,
        max_chunk_memory=1 << 30,
    )
    return made


class Copied(torch.nn.Linear):
    """A linear layer without bias whose state is a copy.

    AutoAWQ saves the weights with ``.cpu()``, which makes no copy on the CPU. Without this class, its search would
    compare every scale but the first with weights that the earlier scales have changed.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight.data = weight.clone()

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {name: part.clone() for name, part in super().state_dict(*arguments, **options).items()}


def salient(generator: torch.Generator, tokens: int = 256, width: int = 128) -> Tensor:
    """InputStats ``[tokens, width]`` a few of which are much larger than the others, as in language models."""
    return torch.randn(tokens, width, generator=generator) * torch.logspace(-1, 1.5, width)


def test_autoawq_packs_the_same_codes_to_the_same_words() -> None:
    linear = torch.nn.Linear(128, 64)
    ours = quantize_weight(linear.weight.detach(), GROUP)
    linear.weight.data = ours.dense()
    scales, zeros = ours.scales.float().t().contiguous(), ours.zeros.float().t().contiguous()
    theirs = gemm.WQLinear_GEMM.from_linear(linear, BITS, GROUP, scales=scales, zeros=zeros)
    for name, part in ours.parts().items():
        assert torch.equal(getattr(theirs, name).cpu(), part), name


def test_autoawq_reads_the_words_as_the_same_weights() -> None:
    ours = quantize_weight(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), GROUP)
    parts = ours.parts()
    read = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], BITS, GROUP)
    torch.testing.assert_close(read.float().t(), ours.dense(), rtol=1e-3, atol=0)  # theirs are products in float16


def test_both_round_weights_to_the_same_codes(quantizer: Any) -> None:
    """Ours rounds the scales to float16 first, so a weight at the middle between two codes may become the other one."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    ours = quantize_weight(weight, GROUP)
    dense, scales, zeros = quantizer.pseudo_quantize_tensor(weight.clone())
    torch.testing.assert_close(ours.scales.float(), scales, rtol=1e-3, atol=0)
    assert torch.equal(ours.zeros.float(), zeros)
    step = scales.repeat_interleave(GROUP, 1)
    codes_apart = ((ours.dense() - dense) / step).round().abs()
    assert codes_apart.max() <= 1
    assert (codes_apart > 0).float().mean() < 0.005


@pytest.mark.parametrize("seed", range(4))
def test_both_find_the_same_scale_of_the_inputs(quantizer: Any, seed: int) -> None:
    """Of one layer both minimise the mean square error of the outputs, over the same candidates."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = salient(generator), torch.randn(96, 128, generator=generator) * 0.05
    layer, before = Copied(weight), torch.nn.Identity()
    block = SimpleNamespace(named_modules=lambda: [("before", before), ("layer", layer)])
    with torch.no_grad():
        _, _, theirs = quantizer._search_best_scale(block, prev_op=before, layers=[layer], inp=x)
    products = x.t() @ x / len(x)
    ours = best_scale([weight], InputStats(x.abs().mean(0), products), GROUP)
    assert ours.error < 0.95 * ours.plain_error
    torch.testing.assert_close(ours.values, theirs.flatten(), rtol=1e-3, atol=1e-6)
