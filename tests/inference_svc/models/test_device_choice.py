"""Choice of a model's dtype on a GPU."""

from __future__ import annotations

import pytest
import structlog
import torch

from inference_svc.models.device_choice import pick_dtype


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_cards_without_bfloat16_run_float16_and_say_so(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    card = torch.device("cuda", 0)
    with structlog.testing.capture_logs() as logs:
        assert pick_dtype("auto", torch.bfloat16, card) == expected
        assert pick_dtype("bfloat16", torch.bfloat16, card) == torch.bfloat16, "as the user chose"
    assert len(logs) == (expected == torch.float16)
