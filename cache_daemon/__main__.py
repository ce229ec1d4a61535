"""Command line of the daemon: ``python -m cache_daemon``."""

from __future__ import annotations

import os
import sys

# numpy reads this variable when it is imported. The daemon does no linear algebra, and it must have no threads when it
# forks.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from kvsidecar.process.fast_import import fast_imports, skip_optional_imports
from kvsidecar.process.standard_streams import open_standard_streams


def main(arguments: list[str] | None = None) -> int:
    open_standard_streams()
    with fast_imports():
        skip_optional_imports()
        import uvloop  # noqa: F401 - imported once, before the supervisor forks
        from kvsidecar.cli.service_settings import run_service

        from cache_daemon.config import DaemonConfig
        from cache_daemon.prefork_supervisor import run_supervised
        from cache_daemon.server import serve

    given = sys.argv[1:] if arguments is None else arguments
    return run_service("kvsidecar daemon", DaemonConfig, serve, given, run_supervised)


if __name__ == "__main__":
    sys.exit(main())
