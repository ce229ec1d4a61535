"""The console script ``kvsidecar``."""

from __future__ import annotations

import os
import sys

from kvsidecar.cli.exec_service import ASKED_BY_SHELL, PROGRAMS, become
from kvsidecar.process.sigint import quiet_sigint


def main() -> None:
    """Replace this process with a service's program, or run a command.

    Imports the commands only when it runs one, because that import is slow.
    """
    with quiet_sigint():
        if len(sys.argv) > 1 and sys.argv[1] in PROGRAMS and ASKED_BY_SHELL not in os.environ:
            become(sys.argv[1], sys.argv[2:])
        from kvsidecar.cli.root_command import main as run
    run()
