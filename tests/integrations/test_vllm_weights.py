"""The namespace of vLLM's chunks changes with each file that vLLM's own loader chooses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kvsidecar.test_weights_fingerprint import ENGINE_FOLDERS, MIDDLE, engine_folder, flip

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch.jit, in vLLM


@pytest.mark.parametrize("name", ENGINE_FOLDERS)
def test_each_file_that_vllm_loads_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from kvsidecar.integrations.vllm import namespace_descriptor
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder, expected = engine_folder(tmp_path / "model", name)
    load = LoadConfig()
    loaded = [Path(file) for file in DefaultModelLoader(load)._prepare_weights(str(folder), None, None, True, None)[1]]
    assert set(loaded) == set(expected)
    model = SimpleNamespace(model=str(folder), revision=None, hf_config=SimpleNamespace(to_dict=dict))
    config = SimpleNamespace(model_config=model, load_config=load)
    found = [namespace_descriptor._fingerprint(config)]
    for file in loaded:
        flip(file, MIDDLE)
        found.append(namespace_descriptor._fingerprint(config))
    assert len(set(found)) == len(loaded) + 1
