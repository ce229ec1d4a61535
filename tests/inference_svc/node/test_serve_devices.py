"""GPUs that ``kvsidecar serve`` gives to its workers. The tests start no node and need no GPU."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from inference_svc.node import supervisor
from inference_svc.node.restarting_process import RestartingProcess
from inference_svc.node.supervisor import ServeConfig


def test_gpus_are_given_to_workers_in_turn(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker sees its own GPU only, so that none of its work can run on another one."""
    monkeypatch.setattr(supervisor, "cuda_devices", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second, gateway = children("demo", "--devices", "0,1")
    assert "--device=cuda" in first
    assert "--device=cuda" in second
    assert any(flag.count("worker-") == 2 for flag in gateway), "as many workers as GPUs"
    seen = [supervisor.worker_gpu(ServeConfig(devices="0,1"), i)["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert seen == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert supervisor.worker_gpu(ServeConfig(devices="1"), 0) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    assert supervisor.worker_gpu(ServeConfig(), 0) == {}


def test_workers_on_one_gpu_do_not_each_take_its_memory(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "cuda_devices", lambda: 2)

    def pools(*flags: str) -> list[str]:
        return [part for part in children("demo", *flags)[0] if part.startswith("--pool-bytes")]

    assert pools() == []
    assert pools("--devices", "0,1") == []
    assert pools("--workers", "2") == [f"--pool-bytes={2 << 30}"]
    assert pools("--devices", "0,1", "--workers", "3") == [f"--pool-bytes={2 << 30}"]
    assert pools("--devices", "0", "--workers", "2", "--pool-bytes", "8GiB") == [f"--pool-bytes={8 << 30}"]


def test_a_worker_of_several_ranks_gets_as_many_gpus(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "cuda_devices", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second, _ = children("demo", "--devices", "0,1,2,3", "--tensor-parallel-size", "2")
    assert "--tensor-parallel-size=2" in first
    assert "--tensor-parallel-size=2" in second
    config = ServeConfig(devices="0,1,2,3", tensor_parallel_size=2)
    assert [supervisor.worker_gpu(config, i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--devices", "0,2"), "devices is 0,2, and this machine has 2: allowed are 0 to 1"),
        (("--devices", "0;1"), "devices is '0;1'; allowed are numbers with commas between them: 0,1"),
        (("--devices", "0", "--device", "cpu"), "devices is 0 and device is cpu; leave one out"),
        (("--devices", "0", "--tensor-parallel-size", "2"), "tensor_parallel_size is 2; name 2 GPUs"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    flags: tuple[str, ...], said: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "cuda_devices", lambda: 2)
    assert said in serve("demo", *flags)


def test_a_child_gets_its_environment(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['A_GPU'])"]
    asyncio.run(RestartingProcess("worker-0", command, environment={"A_GPU": "1"})._run_once())
    assert (tmp_path / "seen").read_text() == "1"
