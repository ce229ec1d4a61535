"""``python -m kvkernels.cpu``: compiles the CPU kernels."""

import sys

from kvkernels.cpu.cpu_build import main

if __name__ == "__main__":
    sys.exit(main())
