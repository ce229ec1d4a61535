"""``python -m kvkernels.cpu``: compiles the CPU kernels."""

import sys

from kvkernels.cpu.build import main

if __name__ == "__main__":
    sys.exit(main())
