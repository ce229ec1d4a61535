"""The emulator refuses what a GPU refuses: misaligned accesses and launches beyond a card's limits."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kvkernels.cuda.cuda_attention import shared_bytes
from kvkernels.cuda.cuda_kv_pack import _KvPackParams
from kvkernels.cuda.cuda_library import KernelLaunchError
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT16
from kvsidecar.chunk_layout import Geometry, new_header

from tests.kvkernels.doubles.card import A100, H100, RTX_4060, T4, V100, Card
from tests.kvkernels.emulated.conftest import Emulated
from tests.kvkernels.emulated.oracle import Case
from tests.kvkernels.emulated.test_cuda_attention import run_in_pool
from tests.kvkernels.emulated.test_cuda_kv_pack import address, pack, pools, unpack, whole


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("off", [1, 8])
def test_a_misaligned_access_is_named(emulated: Emulated, bits: int, off: int) -> None:
    """A payload at no multiple of 16: no copy or matrix instruction takes part, only plain accesses of 16 bytes."""
    header = new_header(Geometry(1, 2, 64, DATA_TYPE_FLOAT16, bits), list(range(16)), 0)
    payload, pool = np.zeros(header.payload_bytes + off, np.uint8), torch.zeros(1, 2, 16, 64, dtype=torch.float16)
    slots, at = torch.arange(16), int(payload.ctypes.data)
    pieces = [whole(header, slots, range(1))]
    unpack(emulated, pool, pool.clone(), pieces, at)
    with pytest.raises(KernelLaunchError, match=r"misaligned address: an access of thread \d+ at .*kv_pack\.cu:\d+"):
        unpack(emulated, pool, pool.clone(), pieces, at + off)


@pytest.mark.parametrize(("card", "fits"), [(T4, False), (V100, True), (RTX_4060, True), (A100, True), (H100, True)])
def test_a_block_has_the_shared_memory_of_the_card(emulated: Emulated, card: Card, fits: bool) -> None:
    emulated.use(card)
    case = Case(((3, 40),), 1, 1, 256, torch.float16)
    if fits:
        run_in_pool(emulated, case)
        return
    with pytest.raises(KernelLaunchError, match="67584 bytes of shared memory for a block; this card has 65536"):
        run_in_pool(emulated, case)
    run_in_pool(emulated, Case(((3, 40),), 1, 1, 128, torch.float16))


@pytest.mark.parametrize(
    ("grid", "threads", "reason"),
    [
        ((1, 65_536, 1), 128, "y and z of a grid are 1 to 65535"),
        ((1, 1, 0), 128, "y and z of a grid are 1 to 65535"),
        ((1, 1, 1), 160, "160 threads in a block; its launch bounds are 128"),
    ],
)
def test_a_launch_beyond_the_bounds_fails(
    emulated: Emulated, grid: tuple[int, int, int], threads: int, reason: str
) -> None:
    with pytest.raises(KernelLaunchError, match=reason):
        emulated.launch("unpack8_f16", grid, threads, 0, _KvPackParams(), 0)


def test_a_block_has_the_registers_of_the_card(emulated: Emulated) -> None:
    """The figures are the compiler's, so a kernel that grows beyond its launch bounds fails here."""
    emulated.use(H100)
    with pytest.raises(KernelLaunchError, match=r"attention_pool_f16_256: \d+ registers for a block; H100 has 65536"):
        emulated.launch("attention_pool_f16_256", (1, 1, 1), 1024, shared_bytes(256), _KvPackParams(), 0)


def test_launches_of_several_threads_come_one_after_another(emulated: Emulated) -> None:
    """Loads and stores launch on threads of their own, and ctypes calls without the GIL."""
    (keys, values), slots = pools(torch.float16, 64, seed=0), torch.arange(150)
    header = new_header(Geometry(3, 2, 64, DATA_TYPE_FLOAT16, 8), list(range(150)), 0)

    def packed(_: int) -> bytes:
        payload = bytearray(header.payload_bytes)
        pack(emulated, keys, values, [whole(header, slots)], address(payload))
        return bytes(payload)

    alone = packed(0)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(packed, range(16))) == {alone}
