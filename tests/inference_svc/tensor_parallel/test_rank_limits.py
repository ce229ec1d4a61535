"""Settings that work only without ranks are refused in one sentence, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvsidecar.errors import ConfigurationError

from inference_svc.node.supervisor import main
from inference_svc.server.preflight import checked_settings
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.tensor_parallel.rank_limits import check_ranks


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"stream": "full_stream"}, "stream is full_stream, .* allowed for stream: auto and off"),
        ({"speculate": "auto"}, "allowed for speculate: off and ngram"),
        ({"speculate": "draft", "draft_model": "self"}, "allowed for speculate"),
        ({"draft_model": "self"}, "allowed for draft_model: none"),
        ({"lora": ("a=/nowhere",)}, "allowed for lora: none"),
        ({"lora_root": Path("/")}, "allowed for lora_root: none"),
        ({"reuse_anywhere": True}, "allowed for reuse_anywhere: false"),
        ({"unverified_reuse": True}, "allowed for unverified_reuse: false"),
        ({"overflow_bytes": "1GiB"}, "allowed for overflow_bytes: auto and 0"),
        ({"weights": "codes"}, "allowed for weights: auto, 16, 8 and 4"),
        ({"device": "cuda:1"}, "allowed for device: auto, cpu and cuda"),
    ],
)
def test_a_setting_is_refused(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"tensor_parallel_size is 2: .*{said}|{said}") as error:
        check_ranks(WorkerConfig(model="demo", tensor_parallel_size=2, **setting))
    assert "\n" not in str(error.value)
    check_ranks(WorkerConfig(model="demo", **setting))


def test_the_check_is_part_of_the_preflight() -> None:
    with pytest.raises(ConfigurationError, match="tensor_parallel_size is 2"):
        checked_settings(WorkerConfig(model="demo", tensor_parallel_size=2, reuse_anywhere=True, device="cpu"))


def test_serve_refuses_before_it_starts_a_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["demo", "--tensor-parallel-size=2", "--stream=full_stream", f"--runtime-dir={tmp_path / 'run'}"])
    assert code == 2
    assert "stream is full_stream" in capsys.readouterr().err
