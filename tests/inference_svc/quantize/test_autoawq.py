"""AutoAWQ itself as the oracle, where it can be imported: no longer maintained, it needs an older transformers."""

from __future__ import annotations

import pytest
import torch

from inference_svc.quantize.awq_rounding import quantize_weight

gemm = pytest.importorskip(
    "awq.modules.linear.gemm",
    reason="AutoAWQ (the extra `quantize`) is not here, or does not run beside this transformers",
    exc_type=ImportError,
)


def test_autoawq_packs_the_same_codes_to_the_same_words() -> None:
    linear = torch.nn.Linear(128, 64)
    ours = quantize_weight(linear.weight.detach(), 64)
    linear.weight.data = ours.dense()
    scales, zeros = ours.scales.float().t().contiguous(), ours.zeros.float().t().contiguous()
    theirs = gemm.WQLinear_GEMM.from_linear(linear, 4, 64, scales=scales, zeros=zeros)
    for name, part in ours.parts().items():
        assert torch.equal(getattr(theirs, name).cpu(), part), name
