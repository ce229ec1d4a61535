"""Two steps: the tests marked ``gpu``, and the kernels under a memory checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from kvkernels.cuda import emulator

from benchmarks.first_contact.contact_device import ContactDevice, GpuDevice
from benchmarks.first_contact.row import RowFile

# Tests of the contracts of memory, streams, capture, and sharing between processes. On a card, the tests marked gpu
# run; without a card, the other tests check the same contracts with doubles.
TESTS = (
    "tests/kvkernels/device/test_device_contract.py",
    "tests/kvkernels/test_chunk_transfer.py",
    "tests/kvkernels/test_kernel_select.py",
    "tests/cache_daemon/memory/test_device_memory.py",
    "tests/cache_daemon/memory/test_shared_device_memory.py",
    "tests/inference_svc/model_runner/test_cuda_graphs.py",
    "tests/inference_svc/model_runner/test_cuda_capture.py",
)
# torch's own driver calls sometimes fail, and torch handles these errors, so memcheck must not report them.
_CHECKER_TOOLS = {"memcheck": ["--report-api-errors=no"], "racecheck": []}
_CHECKER_SECONDS = 55.0


def check_contract(device: ContactDevice, rows: RowFile) -> None:
    """Run the tests without the suite's configuration, because the machine may lack the plugins that it needs."""
    on_card = isinstance(device, GpuDevice)
    with tempfile.TemporaryDirectory(prefix="kvsidecar-contract-") as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", "."]
        command += ["-W", "ignore", "-p", "no:cacheprovider", "-m", "gpu" if on_card else "not gpu"]
        done = subprocess.run([*command, f"--junit-xml={results}", *TESTS], capture_output=True, text=True)
        print(done.stdout, done.stderr)
        if not results.exists():
            raise RuntimeError(f"pytest says: {(done.stdout + done.stderr)[-300:]}")
        for case in ET.parse(results).getroot().iter("testcase"):
            _add(rows, case)


def _add(rows: RowFile, case: ET.Element) -> None:
    name = f"{case.get('classname', '').split('.')[-1]}: {case.get('name')}"
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return rows.failed(name, (found.get("message") or found.text or kind)[:300])
    if (skipped := case.find("skipped")) is not None:
        return rows.measured(name, f"skipped: {skipped.get('message')}")
    return rows.passed(name, f"{float(case.get('time', 0)):.1f} s")


def sanitize(device: ContactDevice, rows: RowFile) -> None:
    """Run a few kernels under compute-sanitizer; without a GPU, run the emulator under the address sanitizer."""
    if not isinstance(device, GpuDevice):
        _sanitize_emulator(rows)
        return
    checker = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if checker is None:
        rows.measured("compute-sanitizer", "not installed; kernels were not checked for accesses out of bounds")
        return
    for tool, more in _CHECKER_TOOLS.items():
        with tempfile.TemporaryDirectory(prefix="kvsidecar-sanitizer-") as folder:
            child = [sys.executable, "-m", "benchmarks.first_contact.step_child", "few_kernels"]
            command = [checker, f"--tool={tool}", *more, "--error-exitcode=9", *child, "--rows", f"{folder}/rows.jsonl"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECKER_SECONDS)
            except subprocess.TimeoutExpired:
                rows.measured(tool, f"ended after {_CHECKER_SECONDS:.0f} s without a verdict")
                continue
            found = RowFile(Path(folder) / "rows.jsonl").read()
            if done.returncode or not found or any(row.passed is False for row in found):
                print(done.stdout[-20_000:], done.stderr[-20_000:])
                said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
                rows.failed(tool, f"code {done.returncode}: {' '.join(said[1:4] or [done.stderr[-200:]])[:300]}")
            else:
                rows.passed(tool, f"{len(found)} kernels without an error")


def _sanitize_emulator(rows: RowFile) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        rows.measured("address sanitizer", "no g++")
        return
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True)
    library = emulator.build(sanitize=True, fewest=True)
    # The emulator's fibers change stacks, which the sanitizer cannot follow. Python does not free all memory at exit.
    options = "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=1"
    environment = {**os.environ, "LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": options}
    command = [sys.executable, "-m", "tests.kvkernels.emulated.sanitized", str(library), "--few"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        rows.failed("address sanitizer", done.stderr[-300:])
    else:
        rows.passed("address sanitizer", "attention, f16, 64 channels")
