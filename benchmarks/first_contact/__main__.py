"""First contact with a GPU: runs every step in a child process; writes one JSON and one table.

On a machine without a GPU, the command says so and exits with 0. With ``--device fake``, it runs all steps without a
GPU: on the fake driver, the emulator and the CPU. Each row then names its fake parts.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from benchmarks.first_contact import offline_wheels

ROOT = Path(__file__).parents[2]
TOTAL_SECONDS = 470.0
_BUSY = 3  # factor of the time limits without a GPU, because other work may share the machine
# Time limits in seconds, by the name of the step.
STEPS = {
    "card": 60,
    "build": 150,
    "kernels": 120,
    "contract": 120,
    "engine": 180,
    "sanitizer": 120,
    "kernel_times": 90,
    "engine_times": 120,
}
# Steps that compare results, and measure no times. They run at the same time if the machine has enough processors.
_AT_ONCE = ("kernels", "contract", "engine", "sanitizer")
_PROCESSORS = 8


def devices() -> tuple[int, str]:
    """Return the number of GPUs, and the reason if there are none."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError as error:
        return 0, str(error)
    for call, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        if code := getattr(driver, call)(*arguments):
            return 0, f"{call} says error {code}"
    return count.value, "the driver has no device"


def _import_from(*folders: Path) -> None:
    """Add folders to the import path of this process and of its children."""
    paths = [str(folder) for folder in folders]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*paths, os.environ.get("PYTHONPATH"))))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_contact", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for first_contact.json")
    parser.add_argument("--only", choices=STEPS, action="append", help="only this step; repeatable")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--model", default="", help="a model's folder, to run beside shape:qwen2.5-0.5b")
    parser.add_argument("--wheels", type=Path, default=offline_wheels.FOLDER, help="folder of make gpu-wheels")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out is {options.out}, which is a file; it must be a folder")
    if options.device == "cuda":
        count, reason = devices()
        if not count:
            print(f"no GPU: {reason}. Nothing was run; --device fake runs all steps without one.")
            return 0
    _import_from(*(ROOT / part for part in ("", "kernels", "clients/python")))
    if offline_wheels.missing(tuple(offline_wheels.OFFLINE)) and options.wheels.is_dir():
        _import_from(offline_wheels.unpack(options.wheels.resolve()))
    missing = offline_wheels.missing()
    if options.device == "fake":
        missing = [name for name in missing if name != "cuda.bindings.driver"]  # only tests need it
    if missing:
        print(
            f"missing modules: {', '.join(missing)}. make gpu-wheels collects the small ones on a machine with a "
            f"network; carry {offline_wheels.FOLDER} along",
            file=sys.stderr,
        )
        return 2
    from benchmarks.first_contact.step_runner import Step, StepRunner

    slack = _BUSY if options.device == "fake" else 1
    passed_on = ["--device", options.device, *(["--model", options.model] if options.model else [])]
    runner = StepRunner(passed_on, options.out / "first_contact.json", TOTAL_SECONDS * slack)
    wanted = [Step(name, limit * slack) for name, limit in STEPS.items() if not options.only or name in options.only]
    at_once = [step for step in wanted if step.name in _AT_ONCE]
    if len(at_once) < 2 or len(os.sched_getaffinity(0)) < _PROCESSORS:
        at_once = []
    for step in wanted:
        if step not in at_once:
            runner.run(step)
        elif step is at_once[0]:
            runner.run(*at_once)
    runner.print_table()
    return 1 if runner.failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runner also ends a step's processes
    sys.exit(main())
