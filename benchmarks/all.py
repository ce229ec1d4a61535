"""Runs all benchmarks in sequence and writes their JSON to one folder."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from benchmarks import report

NAMES = (
    "replay",
    "ttft",
    "overhead",
    "decode",
    "speculate",
    "quality",
    "rag",
    "cpu_kernels",
    "store",
    "faults",
    "soak",
    "hostile",
    "gateway_chaos",
    "streaming",
    "agents",
    "engines",
    "peers",
)
_WITHOUT_MODEL = ("cpu_kernels", "store", "faults", "soak", "hostile", "streaming")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run the small sizes")
    parser.add_argument("--model", default="demo", help="demo, shape:NAME or a folder")
    parser.add_argument("--out-dir", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    for name in NAMES:
        began = time.monotonic()
        report.console.rule(name)
        arguments = ["--out", str(options.out_dir / f"{name}.json")]
        if name not in _WITHOUT_MODEL:
            arguments += ["--model", options.model]
        importlib.import_module(f"benchmarks.{name}").main([*arguments, *(["--quick"] if options.quick else [])])
        report.console.print(f"[dim]{name} took {time.monotonic() - began:.0f} s[/dim]")


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
