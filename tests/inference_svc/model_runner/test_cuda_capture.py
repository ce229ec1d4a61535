"""Graph capture on a GPU, and the end of an engine whose device fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvkernels.device.cuda_graph_recorder import CudaGraphRecorder
from torch import Tensor

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
cuda: Any = torch.cuda

# A fresh process, whose first caller has no context.
SELECT = """
import threading, torch
from kvkernels.cuda.kernel_select import kernels_for
found = []
thread = threading.Thread(target=lambda: found.append(kernels_for(torch.device("cuda"))))
thread.start()
thread.join()
assert found[0].kernels is not None, found[0].why
"""
# A wild address kills the context for good.
DIE = """
import torch
from kvkernels.cuda import awq_gemm, kernel_select
from inference_svc.model_runner.engine_lost import EngineLost, check_device
device = torch.device("cuda", 0)
kernels = kernel_select.kernels_for(device).kernels
params = awq_gemm._AwqParams(weights=64, scales=64, zeros=64, output=64, in_=640, out=192, group=64, splits=1)
try:
    kernels.launch("awq_dequantize_f16", (3, 10, 1), 128, 0, params, 0)
    torch.cuda.synchronize()
except RuntimeError as error:
    try:
        check_device(device, error)
    except EngineLost:
        raise SystemExit(70)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)


def test_the_first_caller_needs_no_context() -> None:
    done = run(SELECT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_illegal_access_loses_the_engine() -> None:
    done = run(DIE)
    assert done.returncode == 70, done.stderr[-2000:]


def test_a_replay_computes_the_step_with_new_inputs() -> None:
    x = torch.ones(1000, device=CUDA)
    replay = CudaGraphRecorder(CUDA).record(lambda: (x * 3).sum().reshape(1))
    x.fill_(2)
    assert float(replay()) == 6000


def raised() -> Tensor:
    raise RuntimeError("refused by the step")


def waited() -> Tensor:
    cuda.synchronize()  # not permitted while a stream is captured, and it invalidates the capture
    return torch.ones(1, device=CUDA)


@pytest.mark.parametrize("fails", [raised, waited])
def test_after_a_failed_capture_the_thread_computes_as_before(fails: Callable[[], Tensor]) -> None:
    recorder, before, runs = CudaGraphRecorder(CUDA), cuda.current_stream(CUDA), 0

    def step() -> Tensor:
        nonlocal runs
        runs += 1
        out = torch.ones(1000, device=CUDA) * 2  # allocates from the graphs' memory
        return fails() if cuda.is_current_stream_capturing() else out

    with pytest.raises(RuntimeError):
        recorder.record(step)
    assert runs == 2
    assert cuda.current_stream(CUDA) == before
    assert not cuda.is_current_stream_capturing()
    blocks = [torch.full((1 << 20,), float(i), device=CUDA) for i in range(8)]
    assert [float(block.mean()) for block in blocks] == list(range(8))
    assert float(recorder.record(lambda: torch.ones(10, device=CUDA).sum().reshape(1))()) == 10


def test_a_step_that_reads_on_the_host_is_refused_before_its_capture() -> None:
    def step() -> Tensor:
        assert not cuda.is_current_stream_capturing()
        return torch.ones(1, device=CUDA) * torch.ones(1, device=CUDA).item()

    with pytest.raises(RuntimeError, match="waits for the device"):
        CudaGraphRecorder(CUDA).record(step)
