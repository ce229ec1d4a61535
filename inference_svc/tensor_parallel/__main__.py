"""``python -m inference_svc.tensor_parallel DESCRIPTOR``: a rank, started by rank 0 with its end of a socket pair."""

from __future__ import annotations

import os
import sys

from inference_svc.tensor_parallel.rank_server import main

if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of collectives may hang
