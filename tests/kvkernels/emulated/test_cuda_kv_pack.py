"""KV packing kernels against the torch reference: equal bytes."""

import numpy as np
import pytest
import torch
from kvkernels import kv_pack_reference
from kvkernels.cuda import cuda_kv_pack
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT16
from kvsidecar.chunk_layout import Geometry, layout_of, new_header

from tests.kvkernels.emulated.conftest import Emulated

STORED = {torch.float16: DATA_TYPE_FLOAT16, torch.bfloat16: DATA_TYPE_BFLOAT16}


def pools(dtype: torch.dtype, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(3, 2, 200, dim, generator=generator) for _ in range(2))
    keys[..., 5] *= 40
    values[:, :, 17] *= 20
    return keys.to(dtype), values.to(dtype)


def address(payload: bytearray) -> int:
    return int(np.frombuffer(payload, np.uint8).ctypes.data)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "start"), [(70, 0), (33, 128), (2, 0)])
def test_packing_writes_the_reference_s_bytes(
    emulated: Emulated, dtype: torch.dtype, bits: int, dim: int, tokens: int, start: int
) -> None:
    keys, values = pools(dtype, dim, seed=tokens)
    header = new_header(Geometry(3, 2, dim, STORED[dtype], bits), list(range(tokens)), start)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:tokens]
    mine, theirs = bytearray(header.payload_bytes), bytearray(header.payload_bytes)
    cuda_kv_pack.pack(emulated, keys, values, slots, header, address(mine))
    kv_pack_reference.pack(keys, values, slots, header, layout_of(header).arrays(memoryview(theirs)))
    for name, expected in layout_of(header).arrays(memoryview(theirs)).items():
        np.testing.assert_array_equal(layout_of(header).arrays(memoryview(mine))[name], expected, name)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("rotary", [0, 16, -1])
def test_unpacking_turns_and_scatters_as_the_reference(
    emulated: Emulated, dtype: torch.dtype, bits: int, dim: int, rotary: int
) -> None:
    keys, values = pools(dtype, dim, seed=3)
    header = new_header(Geometry(3, 2, dim, STORED[dtype], bits), list(range(70)), 0)
    payload = bytearray(header.payload_bytes)
    arrays = layout_of(header).arrays(memoryview(payload))
    kv_pack_reference.pack(keys, values, torch.arange(70), header, arrays)
    half = (dim if rotary < 0 else rotary) // 2
    angles = np.random.default_rng(0).normal(size=half).astype(np.float32)
    turn = (np.cos(angles), np.sin(angles)) if half else None
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:50]
    header.ClearField("token_ids")  # a daemon's answer has none
    for layers in (range(3), range(1, 2)):
        mine, theirs = ((torch.zeros_like(keys), torch.zeros_like(values)) for _ in range(2))
        given = None if turn is None else (torch.from_numpy(turn[0]), torch.from_numpy(turn[1]))
        cuda_kv_pack.unpack(emulated, *mine, slots, header, address(payload), given, layers)
        kv_pack_reference.unpack(*theirs, slots, header, arrays, turn, layers)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
        assert mine[0].any()


def test_heads_that_do_not_fit_are_left_to_the_reference() -> None:
    assert cuda_kv_pack.supports(80, rotary_half=16)
    assert not cuda_kv_pack.supports(36)
    assert not cuda_kv_pack.supports(64, rotary_half=6)
    assert not cuda_kv_pack.supports(512)
