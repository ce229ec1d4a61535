"""Compiled KV packing against the torch reference, and the quantization error of both."""

from ctypes import Structure

import pytest
import torch
from kvkernels import ChunkPlacement, LoadedLayers, kv_pack_reference, pack_chunk, unpack_chunk, unpack_chunks
from kvkernels.cpu import kv_pack as cpu
from kvkernels.cpu.cpu_library import Kernel, loaded_library
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import Geometry, layout_of, new_header

TYPES = {torch.float32: DATA_TYPE_FLOAT32, torch.bfloat16: DATA_TYPE_BFLOAT16}


def pools(dtype: torch.dtype, seed: int = 0, dim: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with an outlier channel and an outlier token, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(3, 2, 400, dim, generator=generator) for _ in range(2))
    keys[..., 5] *= 40
    keys[:, :, 0] *= 30
    values[:, :, 17] *= 20
    return keys.to(dtype), values.to(dtype)


def by_kernels(keys: torch.Tensor, values: torch.Tensor, piece: ChunkPlacement, layers: range) -> None:
    cpu.ChunkUnpacker(keys, values, [piece])(layers)


def by_reference(keys: torch.Tensor, values: torch.Tensor, piece: ChunkPlacement, layers: range) -> None:
    assert isinstance(piece.payload, memoryview)
    arrays = layout_of(piece.header).arrays(piece.payload)
    kv_pack_reference.unpack(keys, values, piece.slots, piece.header, arrays, piece.rotation, layers)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("tokens", "start"), [(128, 0), (128, 128), (37, 128), (3, 0), (1, 5)])
def test_a_round_trip_loses_what_the_bits_allow(dtype: torch.dtype, bits: int, tokens: int, start: int) -> None:
    keys, values = pools(dtype)
    header = new_header(Geometry(3, 2, 32, TYPES[dtype], bits), list(range(tokens)), start)
    payload = memoryview(bytearray(header.payload_bytes))
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:tokens]
    pack_chunk(keys, values, slots, header, payload)
    out_k, out_v = torch.zeros_like(keys), torch.zeros_like(values)
    unpack_chunk(out_k, out_v, slots, header, payload)
    k, v = keys[:, :, slots].float(), values[:, :, slots].float()
    got_k, got_v = out_k[:, :, slots].float(), out_v[:, :, slots].float()
    if bits == 16:
        assert torch.equal(k, got_k)
        assert torch.equal(v, got_v)
        return
    sinks = header.sink_tokens
    assert torch.equal(k[:, :, :sinks], got_k[:, :, :sinks]), "the first tokens are kept as they are"
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    step_k = (k[:, :, sinks:].amax(2) - k[:, :, sinks:].amin(2)) / (2**bits - 1) if tokens > sinks else k.sum(2) * 0
    error_k = (k - got_k).abs()[:, :, sinks:]
    assert (error_k <= 0.51 * step_k[:, :, None] + rounding * k.abs()[:, :, sinks:] + 1e-6).all()
    step_v = (v.amax(3) - v.amin(3)) / (2**bits - 1)
    assert ((v - got_v).abs() <= 0.51 * step_v[..., None] + rounding * v.abs() + 1e-6).all()


@pytest.mark.skipif(loaded_library().library is None, reason=loaded_library().why)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("tokens", "start", "dim"), [(128, 0, 32), (70, 128, 32), (2, 0, 32), (70, 0, 20), (9, 64, 6)])
def test_compiled_and_reference_write_the_same_bytes(
    dtype: torch.dtype, bits: int, tokens: int, start: int, dim: int
) -> None:
    """Also for heads whose size is no multiple of a vector, or less than one."""
    keys, values = pools(dtype, seed=2, dim=dim)
    header = new_header(Geometry(3, 2, dim, TYPES[dtype], bits), list(range(tokens)), start)
    slots = torch.arange(9, 9 + tokens)
    mine, theirs = (memoryview(bytearray(header.payload_bytes)) for _ in range(2))
    cpu.pack(keys, values, slots, header, mine)
    kv_pack_reference.pack(keys, values, slots, header, layout_of(header).arrays(theirs))
    assert mine == theirs
    for count in (tokens, max(1, tokens // 2)):
        outs = []
        for unpack in (by_kernels, by_reference):
            out_k, out_v = torch.zeros_like(keys), torch.zeros_like(values)
            unpack(out_k, out_v, ChunkPlacement(header, mine, slots[:count]), range(3))
            outs.append((out_k, out_v))
        assert torch.equal(outs[0][0], outs[1][0])
        assert torch.equal(outs[0][1], outs[1][1])


def test_the_axes_matter() -> None:
    """One outlier channel must not cost other channels precision, as swapped axes would."""
    keys, values = pools(torch.float32)
    header = new_header(Geometry(3, 2, 32, DATA_TYPE_FLOAT32, 8), list(range(128)), 128)
    payload = memoryview(bytearray(header.payload_bytes))
    slots = torch.arange(128, 256)
    pack_chunk(keys, values, slots, header, payload)
    out = torch.zeros_like(keys)
    unpack_chunk(out, torch.zeros_like(values), slots, header, payload)
    normal = [c for c in range(32) if c != 5]
    error = (out - keys)[:, :, slots][..., normal].norm() / keys[:, :, slots][..., normal].norm()
    assert error < 0.01


@pytest.mark.skipif(loaded_library().library is None, reason=loaded_library().why)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("rotary", [32, 8])
def test_compiled_and_reference_rotate_alike(dtype: torch.dtype, bits: int, rotary: int) -> None:
    """Some layers, some channels, and the unquantized sink tokens."""
    keys, values = pools(dtype, seed=3)
    header = new_header(Geometry(3, 2, 32, TYPES[dtype], bits), list(range(70)), 0)
    slots = torch.arange(9, 79)
    payload = memoryview(bytearray(header.payload_bytes))
    pack_chunk(keys, values, slots, header, payload)
    angles = 37 * 10000.0 ** -(torch.arange(rotary // 2, dtype=torch.float64) / (rotary // 2))
    rotation = angles.cos().float().numpy(), angles.sin().float().numpy()
    outs = []
    for unpack in (by_kernels, by_reference):
        out_k, out_v = torch.zeros_like(keys), torch.zeros_like(values)
        unpack(out_k, out_v, ChunkPlacement(header, payload, slots, rotation), range(1, 3))
        outs.append((out_k, out_v))
    (mine_k, mine_v), (theirs_k, theirs_v) = outs
    torch.testing.assert_close(mine_k, theirs_k, atol=1e-5, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(mine_v, theirs_v)
    assert not mine_k[0].any()
    plain = torch.zeros_like(keys)
    unpack_chunk(plain, torch.zeros_like(values), slots, header, payload)
    assert torch.equal(mine_k[1:, ..., rotary:], plain[1:, ..., rotary:])
    norms = mine_k[1:, :, slots].float().norm(dim=-1), plain[1:, :, slots].float().norm(dim=-1)
    torch.testing.assert_close(*norms, rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(loaded_library().library is None, reason=loaded_library().why)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_many_chunks_at_once_are_as_one_after_the_other(bits: int) -> None:
    keys, values = pools(torch.bfloat16, seed=4)
    pieces, at = [], 0
    for tokens, used in ((130, 130), (1, 1), (70, 65), (64, 1)):
        header = new_header(Geometry(3, 2, 32, DATA_TYPE_BFLOAT16, bits), list(range(tokens)), at)
        payload = memoryview(bytearray(header.payload_bytes))
        slots = torch.arange(at, at + tokens)
        pack_chunk(keys, values, slots, header, payload)
        pieces.append(ChunkPlacement(header, payload, slots[:used].flip(0)))
        at += tokens
    one, all_at_once = ((torch.zeros_like(keys), torch.zeros_like(values)) for _ in range(2))
    for piece in pieces:
        unpack_chunk(*one, piece.slots, piece.header, piece.payload)
    groups = [range(1), range(1, 3)]
    for loaded, layers in zip(unpack_chunks(*all_at_once, pieces, groups), groups, strict=True):
        assert loaded == LoadedLayers(layers)
        assert torch.equal(all_at_once[0][: layers.stop], one[0][: layers.stop])
        assert not all_at_once[0][layers.stop :].any()
    assert torch.equal(all_at_once[1], one[1])


@pytest.mark.skipif(loaded_library().library is None, reason=loaded_library().why)
@pytest.mark.parametrize(
    ("bits", "tokens", "pack_threads", "unpack_threads"),
    [(16, 512, 3, 3), (4, 512, 3, 3), (16, 64, 1, 1), (8, 64, 3, 1), (8, 8, 1, 1)],
)
def test_large_copies_run_on_several_threads(
    monkeypatch: pytest.MonkeyPatch, bits: int, tokens: int, pack_threads: int, unpack_threads: int
) -> None:
    used, run = [], Kernel.run_on_own_threads

    def record(kernel: Kernel, job: Structure, threads: int) -> None:
        used.append(threads)
        run(kernel, job, threads)

    monkeypatch.setattr(cpu, "num_own_threads", lambda: 3)
    monkeypatch.setattr(Kernel, "run_on_own_threads", record)
    keys, values = torch.randn(2, 24, 2, 512, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    header = new_header(Geometry(24, 2, 64, DATA_TYPE_BFLOAT16, bits), list(range(tokens)), 0)
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(6))[:tokens]
    mine, theirs = (memoryview(bytearray(header.payload_bytes)) for _ in range(2))
    cpu.pack(keys, values, slots, header, mine)
    kv_pack_reference.pack(keys, values, slots, header, layout_of(header).arrays(theirs))
    assert mine == theirs
    outs = [(torch.zeros_like(keys), torch.zeros_like(values)) for _ in range(2)]
    for out, unpack in zip(outs, (by_kernels, by_reference), strict=True):
        unpack(*out, ChunkPlacement(header, mine, slots), range(24))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
    assert used == [pack_threads, unpack_threads]


def test_some_chunks_are_only_for_some_layers() -> None:
    """Those of tokens outside of the sliding windows."""
    keys, values = pools(torch.float32, seed=4)
    header = new_header(Geometry(3, 2, 32, DATA_TYPE_FLOAT32, 16), list(range(9)), 0)
    payload = memoryview(bytearray(header.payload_bytes))
    pack_chunk(keys, values, torch.arange(9), header, payload)
    near = ChunkPlacement(header, payload, torch.arange(10, 19))
    far = ChunkPlacement(header, payload, torch.arange(30, 39), layers=frozenset({0, 2}))
    loaded = torch.zeros_like(keys), torch.zeros_like(values)
    list(unpack_chunks(*loaded, [near, far], [range(2), range(2, 3)]))
    for got, stored in zip(loaded, (keys, values), strict=True):
        assert torch.equal(got[:, :, 10:19], stored[:, :, :9])
        assert torch.equal(got[[0, 2], :, 30:39], stored[[0, 2], :, :9])
        assert not got[1, :, 30:39].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_damage_stays_visible(bits: int) -> None:
    keys, values = pools(torch.bfloat16, seed=5)
    keys[1, 0, 20, 3] = values[2, 1, 30, 9] = float("nan")
    header = new_header(Geometry(3, 2, 32, DATA_TYPE_BFLOAT16, bits), list(range(60)), 128)
    payload = memoryview(bytearray(header.payload_bytes))
    slots = torch.arange(60)
    pack_chunk(keys, values, slots, header, payload)
    out_k, out_v = torch.zeros_like(keys), torch.zeros_like(values)
    unpack_chunk(out_k, out_v, slots, header, payload)
    assert out_k[1, 0, 20, 3].isnan()
    assert out_v[2, 1, 30, 9].isnan()
    assert not out_k[0].isnan().any()
    assert not out_v[:2].isnan().any()


@pytest.mark.skipif(loaded_library().library is None, reason=loaded_library().why)
def test_a_payload_of_another_length_is_refused() -> None:
    keys, values = pools(torch.bfloat16)
    header = new_header(Geometry(3, 2, 32, DATA_TYPE_BFLOAT16, 8), list(range(60)), 0)
    with pytest.raises(ValueError, match="the payload of 60 tokens is not"):
        pack_chunk(keys, values, torch.arange(60), header, memoryview(bytearray(header.payload_bytes - 1)))
