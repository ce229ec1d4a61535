"""The dtype follows the CPU's native features, not oneDNN's emulation."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from kvkernels.cpu.cpu_features import native_bfloat16

from inference_svc.models.device_choice import pick_dtype


def test_bfloat16_is_native_where_the_cpu_says_so() -> None:
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        pytest.skip("only x86 under Linux says it in so many words")
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert native_bfloat16() == bool(flags & {"avx512_bf16", "amx_bf16"})


@pytest.mark.parametrize("native", [True, False])
def test_models_of_16_bits_run_as_float32_where_bfloat16_is_emulated(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr("inference_svc.models.device_choice.native_bfloat16", lambda: native)
    expected = torch.bfloat16 if native else torch.float32
    for stored in (torch.bfloat16, torch.float16):
        assert pick_dtype("auto", stored, torch.device("cpu")) == expected
    assert pick_dtype("bfloat16", torch.bfloat16, torch.device("cpu")) == torch.bfloat16
    assert pick_dtype("auto", torch.float32, torch.device("cpu")) == torch.float32
