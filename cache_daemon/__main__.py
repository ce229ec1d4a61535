"""``python -m cache_daemon``: the daemon's command line."""

from __future__ import annotations

import sys

from kvsidecar.cli.settings import run_service


def main(arguments: list[str] | None = None) -> int:
    from cache_daemon.config import DaemonConfig
    from cache_daemon.server import serve

    return run_service("kvsidecar daemon", DaemonConfig, serve, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
