"""The console script ``kvsidecar``."""

from __future__ import annotations

from kvsidecar.interrupts import ending_quietly


def main() -> None:
    """Imports the commands, which takes a while, and runs one."""
    with ending_quietly():
        from kvsidecar.cli.main import main as run
    run()
