"""Engines of PyTorch share what they store where their machines compute the same bits, or where they are told to."""

from __future__ import annotations

import pytest
import torch
from kvsidecar.errors import ConfigurationError
from kvsidecar.integrations.torch_numerics import SHARED, torch_numerics
from kvsidecar.integrations.vllm.connector_settings import read_settings

CPU = torch.device("cpu")


def test_a_machine_has_one_identity_for_each_type() -> None:
    first, second, other = (torch_numerics(CPU, dtype, False) for dtype in (torch.bfloat16,) * 2 + (torch.float32,))
    assert first == second != other


def test_another_library_is_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    right, linear = torch_numerics(CPU, torch.bfloat16, False), torch.nn.functional.linear

    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = linear(x, weight)
        out.view(torch.uint8)[0, 0] ^= 1
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    assert torch_numerics(CPU, torch.bfloat16, False) != right


def test_another_device_is_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_numerics(CPU, torch.bfloat16, False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert torch_numerics(CPU, torch.bfloat16, False) != right
    assert torch_numerics(CPU, torch.bfloat16, True) == SHARED


def test_sharing_across_machines_is_a_switch_of_the_connector() -> None:
    assert not read_settings({}).share_across_machines
    assert read_settings({"share_across_machines": True}).share_across_machines
    with pytest.raises(ConfigurationError, match="share_across_machines is 1; it must be true or false"):
        read_settings({"share_across_machines": 1})


def test_the_old_name_of_min_load_tokens_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read_settings({"least_tokens": 32}).min_load_tokens == 32
    assert "min_load_tokens" in caplog.text
    with pytest.raises(ConfigurationError, match="least_tokens"):
        read_settings({"least_tokens": 32, "min_load_tokens": 16})
