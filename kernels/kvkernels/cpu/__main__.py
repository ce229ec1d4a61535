"""Command that compiles the CPU kernels: ``python -m kvkernels.cpu``."""

import sys

from kvkernels.cpu.cpu_build import main

if __name__ == "__main__":
    sys.exit(main())
