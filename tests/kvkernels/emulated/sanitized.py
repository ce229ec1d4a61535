"""Kernel tests under the address sanitizer: ``python -m tests.kvkernels.emulated.sanitized LIBRARY``."""

import sys
from pathlib import Path

import torch

from tests.kvkernels.emulated.conftest import Emulated
from tests.kvkernels.emulated.oracle import Case, assert_close, cascade
from tests.kvkernels.emulated.test_awq_gemm import test_products_equal_those_in_float64
from tests.kvkernels.emulated.test_cuda_attention import run_in_pool
from tests.kvkernels.emulated.test_cuda_kv_pack import (
    test_packing_writes_the_reference_s_bytes,
    test_unpacking_turns_and_scatters_as_the_reference,
)


def main() -> None:
    torch.set_num_threads(1)
    library = Emulated(Path(sys.argv[1]))
    run_in_pool(library, Case(((1, 65), (70, 130)), 7, 1, 64, torch.float16), splits=2)
    if "--few" in sys.argv:
        return
    for dim in (96, 256):
        run_in_pool(library, Case(((33, 100),), 4, 2, dim, torch.bfloat16), paged=16, window=40)
    assert_close(*cascade(library, Case(((1, 9), (5, 70), (1, 2)), 4, 2, 128, torch.float16), 130, sharing=2))
    for bits in (16, 8, 4):
        test_packing_writes_the_reference_s_bytes(library, torch.float16, bits, 80, 70, 0)
        test_unpacking_turns_and_scatters_as_the_reference(library, torch.bfloat16, bits, 128, -1)
    test_products_equal_those_in_float64(library, torch.float16, 64, 5, 3)


if __name__ == "__main__":
    main()
