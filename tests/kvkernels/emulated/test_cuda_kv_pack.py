"""KV packing kernels against the torch reference: equal bytes."""

from typing import Any

import numpy as np
import pytest
import torch
from kvkernels import kv_pack_reference
from kvkernels.cuda import cuda_kv_pack
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.cuda.piece_table import PieceTable, TablePiece, sections_at
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT16, ChunkHeader
from kvsidecar.chunk_layout import Geometry, layout_of, new_header
from numpy.typing import NDArray
from torch import Tensor

from tests.kvkernels.emulated.conftest import SCHEDULES, Emulated

Rotation = tuple[NDArray[Any], NDArray[Any]]
STORED = {torch.float16: DATA_TYPE_FLOAT16, torch.bfloat16: DATA_TYPE_BFLOAT16}


def pools(dtype: torch.dtype, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(3, 2, 200, dim, generator=generator) for _ in range(2))
    keys[..., 5] *= 40
    values[:, :, 17] *= 20
    return keys.to(dtype), values.to(dtype)


def whole(
    header: ChunkHeader, slots: Tensor, layers: range = range(3), turn: Rotation | None = None, at: int = 0
) -> TablePiece:
    return TablePiece(header, slots, layers, sections_at(header, at), turn)


def pack(kernels: Kernels, keys: Tensor, values: Tensor, pieces: list[TablePiece], payloads: int) -> None:
    table = PieceTable(pieces, packs=True)
    there = table.to(keys.device)
    cuda_kv_pack.pack(kernels, keys, values, table, there.data_ptr(), payloads)


def unpack(kernels: Kernels, keys: Tensor, values: Tensor, pieces: list[TablePiece], payloads: int) -> None:
    table = PieceTable(pieces)
    there = table.to(keys.device)
    cuda_kv_pack.unpack(kernels, keys, values, table, there.data_ptr(), payloads)


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
    pack(emulated, keys, values, [whole(header, slots)], address(mine))
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
        unpack(emulated, *mine, [whole(header, slots, layers, turn)], address(payload))
        kv_pack_reference.unpack(*theirs, slots, header, arrays, turn, layers)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
        assert mine[0].any()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_one_launch_unpacks_many_chunks_and_layers(emulated: Emulated, bits: int) -> None:
    """Chunks of different lengths, some only for some layers, with and without a shift; slots of others keep theirs."""
    keys, values = pools(torch.bfloat16, 64, seed=5)
    angles = np.random.default_rng(1).normal(size=16).astype(np.float32)
    sizes, free = (33, 1, 40, 70), torch.randperm(200, generator=torch.Generator().manual_seed(2))
    pieces, payload, theirs = [], bytearray(), [torch.full_like(x, float("nan")) for x in (keys, values)]
    mine = [x.clone() for x in theirs]
    for i, (tokens, layers) in enumerate(zip(sizes, (range(3), range(1, 2), range(3), range(2, 3)), strict=True)):
        header = new_header(Geometry(3, 2, 64, DATA_TYPE_BFLOAT16, bits), list(range(tokens)), 0)
        source, slots = torch.arange(tokens), free[:tokens]
        free = free[tokens:]
        part, turn = bytearray(-(-header.payload_bytes // 64) * 64), (np.cos(angles), np.sin(angles)) if i % 2 else None
        arrays = layout_of(header).arrays(memoryview(part)[: header.payload_bytes])
        kv_pack_reference.pack(keys, values, source, header, arrays)
        kv_pack_reference.unpack(*theirs, slots, header, arrays, turn, layers)
        pieces.append(whole(header, slots, layers, turn, at=len(payload)))
        payload += part
    for schedule in SCHEDULES[::4]:
        emulated.schedule(schedule)
        unpack(emulated, *mine, pieces, address(payload))
        for got, expected in zip(mine, theirs, strict=True):
            assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_one_launch_packs_many_chunks(emulated: Emulated, bits: int) -> None:
    keys, values = pools(torch.float16, 128, seed=6)
    mine, theirs, pieces = bytearray(), bytearray(), []
    for tokens, start in ((70, 0), (3, 70), (33, 73)):
        header = new_header(Geometry(3, 2, 128, DATA_TYPE_FLOAT16, bits), list(range(tokens)), start)
        part, slots = bytearray(-(-header.payload_bytes // 64) * 64), torch.arange(start, start + tokens)
        arrays = layout_of(header).arrays(memoryview(part)[: header.payload_bytes])
        kv_pack_reference.pack(keys, values, slots, header, arrays)
        pieces.append(whole(header, slots, at=len(theirs)))
        theirs += part
    for schedule in SCHEDULES[::4]:
        emulated.schedule(schedule)
        mine = bytearray(len(theirs))
        pack(emulated, keys, values, pieces, address(mine))
        assert mine == theirs


def test_codes_are_accessed_by_16_bytes_where_a_head_allows_it() -> None:
    def channels(dim: int, bits: int, half: int = 0) -> int:
        header = new_header(Geometry(1, 1, dim, DATA_TYPE_FLOAT16, bits), [1], 0)
        turn = (np.zeros(half, np.float32),) * 2 if half else None
        return PieceTable([whole(header, torch.arange(1), range(1), turn)]).channels

    for dim in (64, 96, 128, 256):
        assert [channels(dim, bits) * bits // 8 for bits in (16, 8, 4)] == [16, 16, 16]
    assert channels(80, 4) == 16  # 8 bytes
    assert channels(72, 4) == 8
    assert channels(96, 4, half=48) == 16  # no thread has channels of both halves of the shift


def test_values_that_are_not_numbers_are_copied_bit_by_bit(emulated: Emulated) -> None:
    """A float32 in between would change the bits of a NaN."""
    keys = torch.full((1, 1, 8, 64), 0x7F81, dtype=torch.int16).view(torch.bfloat16)
    header = new_header(Geometry(1, 1, 64, DATA_TYPE_BFLOAT16, 16), list(range(8)), 0)
    payload, slots = bytearray(header.payload_bytes), torch.arange(8)
    loaded = torch.zeros_like(keys), torch.zeros_like(keys)
    pack(emulated, keys, keys, [whole(header, slots, range(1))], address(payload))
    unpack(emulated, *loaded, [whole(header, slots, range(1))], address(payload))
    for got in loaded:
        assert torch.equal(got.view(torch.int16), keys.view(torch.int16))


@pytest.mark.parametrize("bits", [8, 4])
def test_values_that_are_not_numbers_stay_visible(emulated: Emulated, bits: int) -> None:
    keys, values = pools(torch.bfloat16, 64, seed=7)
    keys[1, 0, 20, 3] = values[2, 1, 30, 9] = float("nan")
    header = new_header(Geometry(3, 2, 64, DATA_TYPE_BFLOAT16, bits), list(range(60)), 128)
    payload, pieces = bytearray(header.payload_bytes), [whole(header, torch.arange(60))]
    loaded = torch.zeros_like(keys), torch.zeros_like(values)
    pack(emulated, keys, values, pieces, address(payload))
    unpack(emulated, *loaded, pieces, address(payload))
    assert loaded[0][1, 0, 20, 3].isnan()
    assert loaded[1][2, 1, 30, 9].isnan()


def test_heads_that_do_not_fit_are_left_to_the_reference() -> None:
    assert cuda_kv_pack.supports(80, rotary_half=16)
    assert not cuda_kv_pack.supports(36)
    assert not cuda_kv_pack.supports(64, rotary_half=12)
    assert not cuda_kv_pack.supports(512)
