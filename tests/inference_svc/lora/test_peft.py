"""What PEFT itself computes with an adapter that it wrote, the worker computes; with PEFT under ``make test-peft``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsidecar.errors import ConfigurationError

from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from tests.inference_svc.lora.random_adapters import adapter
from tests.inference_svc.models.test_architectures import build

# transformers has been imported: it does not see that accelerate lies beside PEFT.
sys.path += [folder] if (folder := os.environ.get("KVSIDECAR_TEST_PEFT")) else []
peft = pytest.importorskip("peft", reason="PEFT was not fetched; make test-peft runs it")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for what PEFT asks it

SETTINGS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "v_proj", "layers.2.mlp.down_proj"], "r": 4, "lora_alpha": 8},
    "expression": {"target_modules": r".*\.[13]\.(self_attn\.[qk]_proj|mlp\.up_proj)", "r": 3, "lora_alpha": 5},
    "all-linear": {"target_modules": "all-linear", "r": 16, "lora_alpha": 32, "exclude_modules": ["o_proj"]},
    "stabilized": {"target_modules": ["gate_proj", "o_proj"], "r": 8, "lora_alpha": 4, "use_rslora": True},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 3], "layers_pattern": "layers"},
    "one layer": {"target_modules": ["down_proj"], "layers_to_transform": 2, "lora_dropout": 0.1},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"], "r": 4, "lora_alpha": 4,
        "rank_pattern": {"k_proj": 7, r"layers\.[01]\.mlp.down_proj": 2},
        "alpha_pattern": {"layers.3.self_attn.q_proj": 9},
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_peft_agrees(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    loaded, eager, pool = build(name)
    prompt = torch.randint(0, 500, (40,))
    with torch.inference_mode():
        base = eager(prompt[None]).logits[0, -1]
    tuned = peft.get_peft_model(eager, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for parameter_name, parameter in tuned.named_parameters():
        if "lora_B" in parameter_name:  # zeros, until somebody trains them
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    tuned.save_pretrained(tmp_path)
    with torch.inference_mode():
        want = tuned(prompt[None]).logits[0, -1]
    decoder, table = Decoder(loaded), pool.allocate(40)
    assert table is not None
    one = decoder.adopt(adapter(tmp_path, loaded))
    got = decoder(
        forward_batch.build_batch(
            [forward_batch.SequenceSlice(prompt.tolist(), 0, table, True, adapter=one)], pool, loaded.device
        )
    )[0]
    torch.testing.assert_close(got, want, atol=3e-5, rtol=1e-4)
    assert (want - base).norm() > 0.01 * base.norm()


def test_what_peft_adds_beside_linear_layers_is_refused(tmp_path: Path) -> None:
    """By the name of the field that PEFT itself wrote."""
    loaded, eager, _ = build("LlamaForCausalLM")
    dora = peft.get_peft_model(eager, peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    dora.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="sets use_dora: it is a DoRA adapter"):
        adapter(tmp_path, loaded)
