"""Weights that go straight to a device."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

from inference_svc.models import loader
from inference_svc.models.attention_windows import ATTENTION_NAME, reserve_attention_name
from inference_svc.models.device_weights import load_to_device
from inference_svc.models.loader import DEMO_MODEL
from inference_svc.models.meta_model import build_meta_model
from tests.inference_svc.models.test_architectures import CASES, COMMON

# Their experts are merged by transformers while it loads.
MIXTURES = {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}
# The meta device stands for a GPU: what goes there leaves host memory. RssAnon does not count the mapped files.
_CHILD = """
    import sys, threading, time
    import torch
    from inference_svc.models import loader, random_models

    random_models._SHAPES["tiny"][1].update(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)

    def host_bytes():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10

    loader.pick_device = lambda name: torch.device("meta")
    ended, peak, before = threading.Event(), 0, host_bytes()
    def watch():
        global peak
        while not ended.wait(0.001):
            peak = max(peak, host_bytes() - before)
    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = loader.load(sys.argv[1], dtype="float16")
    ended.set()
    watcher.join()
    sizes = [p.numel() * p.element_size() for p in loaded.model.parameters()]
    assert all(p.is_meta for p in loaded.model.parameters())
    print(peak, sum(sizes), max(sizes))
"""


def saved(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> t.PreTrainedModel:
    """Save a random model and its tokenizer; return the model."""
    kind, extra = CASES[name]
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(kind(**COMMON | extra | changes), dtype=dtype)
    model.save_pretrained(folder)
    return model


def add_head(folder: Path, differs: bool = True) -> None:
    """Store a head in a folder whose config.json ties it to the embedding; it differs from that in the last row."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    if differs:
        head[-1] += 1
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})


@pytest.mark.parametrize("name", CASES)
def test_a_model_loaded_to_a_device_is_the_one_that_transformers_loads(name: str, tmp_path: Path) -> None:
    reserve_attention_name()
    saved(tmp_path, name)
    config = t.AutoConfig.from_pretrained(tmp_path)
    mine = load_to_device(tmp_path, config, torch.float16, ATTENTION_NAME, torch.device("cpu"))
    if name in MIXTURES:
        assert mine is None
        return
    theirs = t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16, attn_implementation=ATTENTION_NAME)
    for kind in ("named_parameters", "named_buffers"):
        expected, got = dict(getattr(theirs, kind)()), dict(getattr(mine, kind)())
        assert got.keys() == expected.keys()
        for key, tensor in expected.items():
            assert got[key].dtype == tensor.dtype, key
            assert torch.equal(got[key], tensor), key
    assert mine.generation_config.to_dict() == theirs.generation_config.to_dict()


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_of_its_own_is_kept_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differs: bool) -> None:
    """The meta device stands for a GPU."""
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    add_head(folder, differs)
    monkeypatch.setattr(loader, "pick_device", lambda _: torch.device("meta"))
    model: Any = loader.load(str(folder), dtype="float16").model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not differs


def test_models_built_at_once_leave_modules_of_other_threads_alone() -> None:
    config = t.LlamaConfig(**COMMON)
    built = threading.Event()
    others: list[torch.nn.Linear] = []

    def build() -> bool:
        models = [build_meta_model(config, torch.float32, "eager") for _ in range(20)]
        return all(weight.is_meta for model in models for weight in model.parameters())

    def make_others() -> None:
        while not built.is_set():
            others.append(torch.nn.Linear(2, 2))

    with ThreadPoolExecutor(4) as threads:
        made = threads.submit(make_others)
        models_on_meta = [threads.submit(build) for _ in range(3)]
        try:
            assert all(model.result() for model in models_on_meta)
        finally:
            built.set()
        made.result()
    assert others
    assert not any(weight.is_meta for other in others for weight in other.parameters())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["checkpoint", "shape:tiny"])
def test_host_memory_holds_no_copy_of_a_model_on_a_device(model: str, tmp_path: Path) -> None:
    if model == "checkpoint":
        saved(tmp_path, "Qwen2ForCausalLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
        t.AutoTokenizer.from_pretrained("inference_svc/demo_model").save_pretrained(tmp_path)
        model = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILD), model], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peak, total, largest = map(int, done.stdout.split()[-3:])
    assert total > 200 << 20
    assert peak < 2 * largest + (64 << 20) < total
