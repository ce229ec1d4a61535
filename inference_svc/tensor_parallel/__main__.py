"""``python -m inference_svc.tensor_parallel DESCRIPTOR``: a rank, started by rank 0 with its end of a socket pair."""

from __future__ import annotations

import os
import sys

from kvsidecar.process.fast_import import fast_imports, gc_paused, skip_optional_imports


def run(descriptor: int) -> int:
    """Runs the rank. Returns its exit code."""
    with fast_imports(), gc_paused():
        skip_optional_imports()
        from inference_svc.tensor_parallel.rank_server import main
    return main(descriptor)


if __name__ == "__main__":
    code = run(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for threads of collectives, which may hang
