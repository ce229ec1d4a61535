"""The example that runs vLLM, in vLLM's environment: ``make test-vllm``."""

from __future__ import annotations

import importlib.util

import pytest

from inference_svc.models.model_resolver import DEMO_MODEL
from tests.examples.programs import cached, run

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1300),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm runs it"
    ),
]


def test_vllm_loads_the_prompt_after_its_restart() -> None:
    cold, warm = cached(run("vllm_restart.py", "--model", str(DEMO_MODEL), seconds=1250))
    assert cold == 0
    assert warm > 200
