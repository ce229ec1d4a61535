"""Child process of one step: ``python -m benchmarks.first_contact.step_child NAME --rows FILE``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from benchmarks.first_contact.contact_device import fake_parts, make_device
from benchmarks.first_contact.row import RowFile

# The module and function of each step.
_FUNCTIONS = {
    "card": ("card_facts", "read_facts"),
    "build": ("card_facts", "build_kernels"),
    "kernels": ("kernel_errors", "check_kernels"),
    "few_kernels": ("kernel_errors", "check_few_kernels"),  # child of the step sanitizer
    "sanitizer": ("contract_tests", "sanitize"),
    "contract": ("contract_tests", "check_contract"),
    "engine": ("engine_answers", "check_engine"),
    "kernel_times": ("kernel_times", "measure_kernels"),
    "engine_times": ("engine_times", "measure_engine"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=_FUNCTIONS)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    # A process that is aborted prints the stack of every thread. The runner ends a step that hangs by SIGTERM.
    os.environ["PYTHONFAULTHANDLER"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended at its time limit"))
    module, function = _FUNCTIONS[options.step]
    device = make_device(options.device, options.model)
    run = getattr(importlib.import_module(f"benchmarks.first_contact.{module}"), function)
    run(device, RowFile(options.rows, fake_parts(device, options.step)))


if __name__ == "__main__":
    main()
