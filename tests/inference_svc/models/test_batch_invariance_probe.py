"""The probe of bit-equality finds what is uneven, and what it found is said."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from kvsidecar.cli.doctor import bits_finding
from torch import Tensor, nn

from inference_svc.models.batch_invariance_probe import batch_variant_shapes, packed_linears_of
from inference_svc.models.mkl_determinism import wanted_setting

EVEN = {"setting": "AVX2,STRICT", "uneven": {"float32": [], "bfloat16": []}}
UNEVEN = {"setting": "AVX2,STRICT", "uneven": {"float32": ["896x896"], "bfloat16": []}}


class Sloppy(nn.Linear):
    """Product that sums in another order for many rows, so its results depend on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 100:
            return super().forward(x)
        return x.flip(1) @ self.weight.flip(1).T


def test_a_product_that_depends_on_its_batch_is_found() -> None:
    torch.manual_seed(0)
    even, sloppy = nn.Linear(256, 64, bias=False), Sloppy(320, 64, bias=False)
    model = nn.Sequential(even, nn.ReLU(), sloppy)
    assert batch_variant_shapes(packed_linears_of(model)) == ["320x64"]
    assert batch_variant_shapes(packed_linears_of(model), many=(64,)) == []


def test_as_workers_multiply_a_row_has_the_same_bits_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "inference_svc.models.batch_invariance_probe"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout) == {"setting": wanted_setting(), "uneven": {"float32": [], "bfloat16": []}}


def test_the_doctor_says_what_was_found_on_which_cpu() -> None:
    good = bits_finding(EVEN, UNEVEN, "", "Some CPU")
    assert "yes, on Some CPU with MKL_CBWR=AVX2,STRICT" in good.detail
    assert "without it not, float32 products 896x896; workers set it" in good.detail
    bad = bits_finding(UNEVEN, UNEVEN, "COMPATIBLE", "Some CPU")
    assert "no, on Some CPU with MKL_CBWR=COMPATIBLE: float32 products 896x896" in bad.detail
    assert bad.advice == "unset MKL_CBWR"
    plain = bits_finding(EVEN | {"setting": ""}, EVEN, "", "Some CPU")
    assert "MKL_CBWR" not in plain.detail
