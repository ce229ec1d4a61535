"""Choice of a model's dtype on a GPU."""

from __future__ import annotations

import pytest
import structlog
import torch

from inference_svc.models import device_choice
from inference_svc.models.device_choice import pick_dtype
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.doubles.card import A100, T4, V100, Card


@pytest.mark.parametrize(("card", "expected"), [(V100, torch.float16), (T4, torch.float16), (A100, torch.bfloat16)])
def test_cards_without_bfloat16_run_float16_and_say_so(
    card: Card, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_choice, "device_of", lambda device: SimulatedDevice(card=card))
    place = torch.device("cuda", 0)
    with structlog.testing.capture_logs() as logs:
        assert pick_dtype("auto", torch.bfloat16, place) == expected
        assert pick_dtype("bfloat16", torch.bfloat16, place) == torch.bfloat16, "as the user chose"
    assert len(logs) == (expected == torch.float16)
