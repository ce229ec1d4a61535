"""Kernels on the devices of a driver that refuses what a real one refuses."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvkernels import ops
from kvkernels.cuda import cuda_sources, kernel_select, nvrtc
from kvkernels.cuda.cuda_build import identity_flags
from kvkernels.cuda.cuda_driver import CubinModule, PrimaryContext
from kvkernels.cuda.cuda_library import KernelLaunchError, Kernels
from kvkernels.cuda.kernel_select import DeviceKernels, KernelSelection, kernels_for, load_library

from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.doubles.card import T4
from tests.kvkernels.doubles.fake_driver import FakeDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver.for_test(devices=2)
    monkeypatch.setattr(kernel_select, "device_of", lambda device: SimulatedDevice(device.index or 0))
    monkeypatch.setattr(nvrtc, "cached_cubins", lambda name: [b"cubin"])
    monkeypatch.setattr(kernel_select, "LIBRARY", kernel_select.LIBRARY / "not built")
    yield fake
    fake.close()


class Params(ctypes.Structure):
    _fields_ = (("payload", ctypes.c_void_p),)


def kernels_of(selection: KernelSelection, ordinal: int) -> Kernels:
    found = selection.of(ordinal)
    assert found.kernels is not None, found.why
    return found.kernels


def launch(kernels: Kernels, shared_bytes: int = 0, y: int = 1) -> None:
    kernels.launch("attention", (1, y, 1), 128, shared_bytes, Params(), 0)


def test_the_first_thread_that_asks_needs_no_context(driver: FakeDriver) -> None:
    selection = KernelSelection()
    kernels = kernels_of(selection, 0)
    launch(kernels)
    assert driver.refused == 0
    assert driver.current == -1, "the thread's context is what it was"
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            launch(kernels_of(selection, 0))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not errors
    assert driver.launches == 2


def test_a_launch_runs_on_its_device_whatever_is_current(driver: FakeDriver) -> None:
    """A module of another context is an invalid handle, and this device's pointers are wild there."""
    selection = KernelSelection()
    first, second = kernels_of(selection, 0), kernels_of(selection, 1)
    with PrimaryContext(0).current():
        launch(second)
        launch(first)
        assert driver.current == 0
    assert driver.launches == 2
    driver.kill(1)
    launch(first)
    with pytest.raises(KernelLaunchError, match="illegal memory access"):
        launch(second)


def test_a_library_is_launched_under_its_devices_guard() -> None:
    events: list[str] = []

    class Library:
        def launch(self, *_: object) -> None:
            events.append("launch")

        def has(self, *_: object) -> bool:
            return True

    class Guard(nullcontext[None]):
        def __enter__(self) -> None:
            events.append("cuda:1")

        def __exit__(self, *_: object) -> None:
            events.append("back")

    launch(DeviceKernels(Library(), Guard))
    assert events == ["cuda:1", "launch", "back"]


def test_the_librarys_kernels_run_on_the_device_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, launched = list[int](), list[list[int]]()

    @contextmanager
    def device(ordinal: int) -> Iterator[None]:
        current.append(ordinal)
        yield
        current.pop()

    library = SimpleNamespace(
        devices=2,
        fingerprint=cuda_sources.fingerprint("cuda"),
        runs_on=lambda capability: capability == (9, 0),
        launch=lambda *_: launched.append([*current]),
    )
    facts = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(kernel_select, "LIBRARY", tmp_path)
    monkeypatch.setattr(kernel_select, "SharedLibrary", lambda path: library)
    monkeypatch.setattr(
        kernel_select, "device_of", lambda card: SimpleNamespace(guard=lambda: device(card.index), facts=facts)
    )
    launch(load_library(1))
    assert launched == [[1]]


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (0, "it reports no device"),
        (-100, "it reports no device"),
        (-35, "no driver, or one that is older than its CUDA"),
        (-3, "CUDA error 3"),
    ],
)
def test_a_library_without_a_device_says_why(
    devices: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_select, "LIBRARY", tmp_path)
    monkeypatch.setattr(kernel_select, "SharedLibrary", lambda path: SimpleNamespace(devices=devices))
    with pytest.raises(OSError, match=reason):
        load_library(0)


RUNTIME_DOUBLE = """
#include <stddef.h>
typedef int cudaError_t;
typedef void* cudaStream_t;
struct dim3 { dim3(unsigned x, unsigned y = 1, unsigned z = 1) {} };
enum { cudaSuccess, cudaFuncAttributeMaxDynamicSharedMemorySize };
inline int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
inline int cudaFuncSetAttribute(const void*, int, int) { return 0; }
inline int cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return 0; }
inline const char* cudaGetErrorString(int) { return ""; }
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to build the library with")
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (identity_flags((80, 90)), ""),
        (identity_flags((75, 80)), ""),  # by PTX
        (identity_flags((90,)), ""),
        (["-DKVK_FINGERPRINT=0e12", *identity_flags((90,))[1:]], "it was built from other sources"),
        (["-Dkvk_fingerprint=kvk_other", *identity_flags((90,))], "it was built from other sources"),
        (identity_flags((100, 120)), "it was built for sm_100, sm_120, and not for sm_90"),
    ],
)
def test_a_library_of_other_sources_or_devices_is_left_for_nvrtc(
    flags: list[str],
    reason: str,
    driver: FakeDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Parameter structs of other sources have other layouts, and a kernel would read wild addresses."""
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME_DOUBLE)
    source, library = cuda_sources.folder() / "cuda" / "launch.cu", tmp_path / "libkvkernels.so"
    compiler = ["c++", "-shared", "-fPIC", f"-I{tmp_path}", *flags, "-xc++", str(source)]
    subprocess.run([*compiler, "-o", str(library)], check=True)
    monkeypatch.setattr(kernel_select, "LIBRARY", library)
    with caplog.at_level(logging.WARNING, "kvkernels"):
        found = KernelSelection().of(0)
    assert found.kernels is not None
    assert found.why == ("compiled by NVRTC" if reason else "fat library")
    assert [reason in message for message in caplog.messages] == [True] * bool(reason), caplog.messages


def test_threads_that_ask_at_once_wait_for_one_compilation(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[str]()

    def cubins(name: str) -> list[bytes]:
        compiled.append(name)
        time.sleep(0.2)
        return [b"cubin"]

    monkeypatch.setattr(nvrtc, "cached_cubins", cubins)
    selection = KernelSelection()
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(selection.of, [0] * 4)
    assert first.kernels is not None
    assert all(other is first for other in others)
    assert compiled == ["sm_90"]


def test_a_device_without_a_number_is_the_threads_current_one(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels by both names, so that a refusal of one is not that of the other."""
    monkeypatch.setattr(kernel_select, "_selection", KernelSelection())
    monkeypatch.setattr(
        kernel_select, "device_of", lambda card: SimulatedDevice(1 if card.index is None else card.index)
    )
    found = kernels_for(torch.device("cuda"))
    assert found is kernels_for(torch.device("cuda", 1))
    assert found is not kernels_for(torch.device("cuda", 0))


def test_a_refusal_is_logged_once_and_tried_again(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_select, "RETRY_SECONDS", 0.0)
    selection = KernelSelection()
    driver.kill(0)
    with caplog.at_level(logging.WARNING, "kvkernels"):
        assert [selection.of(0).kernels for _ in range(3)] == [None] * 3
    assert len(caplog.messages) == 1
    assert "cannot be used on cuda:0" in caplog.messages[0]
    assert "compiled by NVRTC" in caplog.messages[0]
    assert selection.of(1).kernels is not None, "another device is asked for itself"
    driver.revive(0)
    assert selection.of(0).kernels is not None


def test_a_refusal_costs_callers_nothing_for_a_while(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = KernelSelection()
    driver.kill(0)
    refused = selection.of(0)
    driver.revive(0)
    assert selection.of(0) is refused


def test_a_kernel_beyond_a_cards_shared_memory_is_left_to_torch(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A T4 has 64 KiB for a block; attention of 256 channels needs 66 KiB, of 128 it runs."""
    monkeypatch.setattr(kernel_select, "device_of", lambda device: SimulatedDevice(device.index or 0, card=T4))
    monkeypatch.setattr(kernel_select, "_selection", KernelSelection())
    t4 = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING, "kvkernels"):
        assert ops.find_attention_kernels(t4, torch.float16, 256) is None
        assert ops.find_attention_kernels(t4, torch.float16, 256) is None
    assert len(caplog.messages) == 1
    assert "attention of 256 channels needs 67584 bytes of shared memory" in caplog.messages[0]
    assert ops.find_attention_kernels(t4, torch.float16, 128) is not None


def test_a_launch_that_the_card_cannot_make_is_an_error_with_its_name(driver: FakeDriver) -> None:
    driver.reset(1, T4.shared_bytes)
    module = CubinModule([b"cubin"], 0)
    with pytest.raises(KernelLaunchError, match="attention with 67584 bytes of shared memory: invalid argument"):
        launch(module, 67_584)
    with pytest.raises(KernelLaunchError, match=r"attention on a grid of \(1, 70000, 1\)"):
        launch(module, y=70_000)
    assert not module.has("nonsense", Params)
    launch(module, 65_536)
