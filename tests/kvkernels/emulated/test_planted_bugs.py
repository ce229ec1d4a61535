"""Tests of the tests: typical GPU bugs are planted, and the suite must detect them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kvkernels import awq_layout
from kvkernels.cuda import awq_gemm, emulator
from kvkernels.cuda.cuda_library import KernelLaunchError

from tests.kvkernels.emulated.conftest import SCHEDULES, Emulated, plant
from tests.kvkernels.emulated.oracle import Case
from tests.kvkernels.emulated.test_awq_gemm import layer
from tests.kvkernels.emulated.test_cuda_attention import run_in_pool


@dataclass(frozen=True)
class Bug:
    """A planted bug: ``wrong`` replaces ``right``, which occurs once in a file."""

    name: str
    file: str
    right: str
    wrong: str
    seen_by: Callable[[Emulated], None]
    says: str = ""  # the emulator's error; a wrong result for none


def attends(emulated: Emulated) -> None:
    for schedule in SCHEDULES:
        emulated.schedule(schedule)
        run_in_pool(emulated, Case(((70, 200), (3, 65)), 4, 2, 64, torch.float16))
        run_in_pool(emulated, Case(((20, 300),), 4, 2, 64, torch.float16), splits=3, window=100)


def multiplies(emulated: Emulated) -> None:
    words, zeros, scales = layer(256, 64, 64, torch.float16)
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).half()
    expected = x.double() @ awq_layout.reference_weight(words, zeros, scales).double().t()
    for schedule in SCHEDULES:
        emulated.schedule(schedule)
        got = awq_gemm.gemm(emulated, x, awq_gemm.repack(words, zeros, scales), 1)
        assert (got.double() - expected).abs().max() <= 1e-3 * expected.abs().max()


BUGS = (
    Bug(
        "a missing barrier before keys are overwritten",
        "attention.cu",
        "sync_block();  // values have arrived, and all warps are done with the keys",
        "",
        attends,
    ),
    Bug(
        "a missing barrier before keys are read",
        "attention.cu",
        "sync_block();  // keys have arrived, and all warps are done with the previous values",
        "",
        attends,
    ),
    Bug(
        "a missing barrier between the query and the keys that take its place",
        "attention.cu",
        "sync_block();  // keys overwrite the query",
        "",
        attends,
    ),
    Bug(
        "copies that nobody waits for",
        "attention.cu",
        "    copies_wait<0>();\n    sync_block();  // keys have",
        "    copies_wait<1>();\n    sync_block();  // keys have",
        attends,
    ),
    Bug("a mask that hides the row's own key", "attention.cu", "key <= visible_to[r]", "key < visible_to[r]", attends),
    Bug(
        "a mask that shows one key too many",
        "attention.cu",
        "key >= visible_from[r]",
        "key >= visible_from[r] - 1",
        attends,
    ),
    Bug(
        "a bound that forgets the last tile",
        "attention.cu",
        "(min(end, highest + 1) + KEYS - 1) / KEYS",
        "(min(end, highest + 1)) / KEYS",
        attends,
    ),
    Bug(
        "keys that are not those of the lane's matrix",
        "attention.cu",
        "lane / 16 * 8 + lane % 8, b_column",
        "lane / 8 % 2 * 8 + lane % 8, b_column",
        attends,
    ),
    Bug(
        "a fragment's words exchanged",
        "attention.cu",
        "pack<T>(scores[j][0][2], scores[j][0][3]),",
        "pack<T>(scores[j][1][0], scores[j][1][1]),",
        attends,
    ),
    Bug("sums that are not rescaled", "softmax.cuh", "sum[r] *= shrink;", "", attends),
    Bug("rows that share a sum with too few lanes", "softmax.cuh", "sum[r] += shuffle_xor(sum[r], 2);", "", attends),
    Bug("a missing barrier before warps are summed", "awq_gemm.cu", "  sync_block();\n", "", multiplies),
    Bug(
        "scales of another column", "awq_gemm.cu", "8 * n + lane_index() / 4;", "8 * n + lane_index() % 4;", multiplies
    ),
    Bug(
        "rows exchanged in a fragment",
        "awq_gemm.cu",
        "g + 8 * (i % 2), channel",
        "g + 8 * (i / 2), channel",
        multiplies,
    ),
    Bug(
        "keys requested while other warps read the old ones",
        "attention.cu",
        "    sync_block();  // values have arrived, and all warps are done with the keys\n"
        "    if (tile + 1 < tile_to) source.keys(key_tile, first + KEYS);\n    copies_commit();\n",
        "    if (tile + 1 < tile_to) source.keys(key_tile, first + KEYS);\n    copies_commit();\n    sync_block();\n",
        attends,
    ),
    Bug(
        "values requested while other warps read the old ones",
        "attention.cu",
        "    sync_block();  // keys have arrived, and all warps are done with the previous values\n"
        "    source.values(value_tile, first);\n    copies_commit();\n",
        "    source.values(value_tile, first);\n    copies_commit();\n    sync_block();\n",
        attends,
    ),
    Bug(
        "rows padded by 4 bytes, which faults on a GPU",
        "paged_kv.cuh",
        "static constexpr int STRIDE = D + 8;",
        "static constexpr int STRIDE = D + 2;",
        attends,
        says="misaligned address: cp.async of thread",
    ),
)


KERNELS = {attends: "attention.cu", multiplies: "awq_gemm.cu"}


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler to build the CUDA emulator with")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_suite_sees(bug: Bug, tmp_path: Path) -> None:
    plant(tmp_path, bug.file, bug.right, bug.wrong, KERNELS[bug.seen_by])
    broken = Emulated(emulator.build(tmp_path, fewest=True))
    with pytest.raises(KernelLaunchError if bug.says else AssertionError, match=bug.says or None):
        bug.seen_by(broken)


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler to build the CUDA emulator with")
def test_what_sees_them_passes_without_them(emulated: Emulated) -> None:
    attends(emulated)
    multiplies(emulated)
