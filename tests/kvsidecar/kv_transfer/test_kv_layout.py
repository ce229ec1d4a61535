"""Where keys and values lie: every order of dimensions, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvkernels import pack_chunk, paged_gather
from kvkernels.cpu.cpu_library import LoadedLibrary, loaded_library
from kvsidecar.chunk_layout import layout_of, new_header
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.block_copier import BlockCopier, slots_of
from kvsidecar.kv_transfer.kv_layout import KVLayout, LayerKVLayout, PagedKVCache, offsets, strided_layout
from kvsidecar.kv_transfer.layout_selftest import check_layout
from torch import Tensor

from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS, BLOCKS, DIM, HEADS, LAYERS, ORDERS, apart, fill, packed

SLOTS = slots_of([3, 1], BLOCK_TOKENS)


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both implementations of the copies."""
    if request.param == "torch":
        monkeypatch.setattr(paged_gather, "loaded_library", lambda: LoadedLibrary(None, "not here"))
    elif loaded_library().library is None:
        pytest.skip(loaded_library().why)


def packed_by_reference(keys: Tensor, values: Tensor, bits: int, cache: PagedKVCache) -> bytes:
    """The payload of ``[layers, tokens, heads, channels]``, by the kernels that the worker uses."""
    header = new_header(cache.geometry, [0] * keys.shape[1], 0)
    payload = memoryview(bytearray(header.payload_bytes))
    pools = [x.transpose(1, 2).contiguous() for x in (keys, values)]
    pack_chunk(pools[0], pools[1], torch.arange(keys.shape[1]), header, payload)
    return bytes(payload)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_dimensions_is_found_and_moves_whole(order: str) -> None:
    cache, write = apart(order)
    check_layout(cache, write)
    keys, values = fill(write, torch.from_numpy(SLOTS), torch.bfloat16)
    header = new_header(cache.geometry, list(range(len(SLOTS))), 0)
    payload = memoryview(bytearray(header.payload_bytes))
    BlockCopier(cache).pack(SLOTS, header, payload)
    assert bytes(payload) == packed_by_reference(keys, values, 16, cache)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunks_are_the_workers_in_every_type_and_width(dtype: torch.dtype, bits: int) -> None:
    """A transposed cache, and one with keys and values packed and layers interleaved, hold the same chunk."""
    payloads = []
    for cache, write in (apart("bhct", dtype, bits), packed(dtype, bits)):
        keys, values = fill(write, torch.from_numpy(SLOTS), dtype)
        header = new_header(cache.geometry, list(range(len(SLOTS))), 0)
        payload = memoryview(bytearray(header.payload_bytes))
        BlockCopier(cache).pack(SLOTS, header, payload)
        assert bytes(payload) == packed_by_reference(keys, values, bits, cache)
        payloads.append(payload)
        # Back into other blocks, the first three tokens left out.
        there = slots_of([0, 4], BLOCK_TOKENS)
        there[:3] = -1
        copier = BlockCopier(cache)
        copier.unpack(there, header, payload.toreadonly())
        again = memoryview(bytearray(len(payload)))
        plain = new_header(cache.geometry, list(range(len(SLOTS))), 0)
        copier.pack(slots_of([0, 4], BLOCK_TOKENS), plain, again)
        if bits == 16:
            arrays, back = layout_of(header).arrays(payload), layout_of(plain).arrays(again)
            for name in ("keys", "values"):
                assert (back[name][:, 3:] == arrays[name][:, 3:]).all()
                assert not back[name][:, :3].any(), "tokens that were left out were written"
    assert payloads[0] == payloads[1]


def test_an_axis_of_several_modes_is_a_mixed_radix_number() -> None:
    assert offsets(((2, 100), (3, 1))).tolist() == [0, 1, 2, 100, 101, 102]


# ---- planted mistakes -----------------------------------------------------------------------------------------


def test_a_planted_transposition_of_keys_is_caught() -> None:
    """Two heads and as many tokens as channels look the same either way."""
    cache, write = apart("bhct")

    def transposed(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        rows = keys.view(2, BLOCK_TOKENS, HEADS, 2, DIM // 2)  # tokens and half the channels, taken for each other
        write(layer, rows.transpose(1, 4).reshape(keys.shape) if layer == 1 else keys, values, slots)

    with pytest.raises(ConfigurationError, match=r"layer 1's keys of token 0, head 0, channel \d+ is not where bhct"):
        check_layout(cache, transposed)


def test_keys_in_the_place_of_values_are_caught() -> None:
    cache, write = packed()
    with pytest.raises(ConfigurationError, match="layer 0's keys"):
        check_layout(cache, lambda layer, k, v, s: write(layer, v, k, s))


def test_a_layer_in_the_place_of_another_is_caught() -> None:
    cache, write = packed()
    with pytest.raises(ConfigurationError, match="layer 0's keys"):
        check_layout(cache, lambda layer, k, v, s: write((layer + 1) % LAYERS, k, v, s))


def test_heads_and_tokens_in_each_others_place_are_caught() -> None:
    """``[blocks, 8, 8, dim]``: nothing in the shape tells which is which."""
    tensor = torch.zeros(4, 8, 8, DIM)
    right, wrong = (
        LayerKVLayout(strided_layout(tensor, order), strided_layout(tensor.clone(), order))
        for order in ("bthc", "bhtc")
    )

    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for place, given in ((right.keys, keys), (wrong.values, values)):
            place.memory[slots // 8, slots % 8] = given

    from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32
    from kvsidecar.chunk_layout import Geometry

    cache = PagedKVCache(
        "wrong",
        Geometry(1, 8, DIM, DATA_TYPE_FLOAT32, 16),
        8,
        (LayerKVLayout(strided_layout(right.keys.memory, "bhtc"), wrong.values),),
    )
    with pytest.raises(ConfigurationError, match="layer 0's keys of token 0, head 1"):
        check_layout(cache, write)


def test_an_engine_that_writes_less_than_it_was_told_is_caught() -> None:
    cache, write = apart("bthc")
    with pytest.raises(ConfigurationError, match="values are elsewhere"):
        check_layout(cache, lambda layer, k, v, s: write(layer, k[:-1], v[:-1], s[:-1]))


def test_the_check_leaves_no_marks() -> None:
    cache, write = packed()
    check_layout(cache, write)
    assert not cache.layers[0].keys.flat_memory().any()


# ---- what is refused ------------------------------------------------------------------------------------------


def cut(place: KVLayout, **changes: object) -> KVLayout:
    return KVLayout(**{**vars(place), **changes})  # type: ignore[arg-type]


def test_what_reaches_beyond_the_memory_is_refused() -> None:
    cache, _ = apart("bthc")
    layers = tuple(LayerKVLayout(cut(layer.keys, blocks=BLOCKS + 1), layer.values) for layer in cache.layers)
    with pytest.raises(ConfigurationError, match="layer 0's keys reach to element"):
        PagedKVCache("far", cache.geometry, BLOCK_TOKENS, layers)


@pytest.mark.parametrize(
    ("order", "what"), [("bthx", "must name each of b, t, h and c once"), ("bth", "must name each"), ("bttc", "once")]
)
def test_an_order_that_is_none_is_refused(order: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        strided_layout(torch.zeros(2, 2, 2, 2), order)


def test_layers_that_differ_are_refused() -> None:
    one, two = apart("bthc")[0], apart("bhtc")[0]
    with pytest.raises(ConfigurationError, match="layer 1's keys are laid out otherwise than layer 0's"):
        PagedKVCache("mixed", one.geometry, BLOCK_TOKENS, (one.layers[0], *two.layers[1:]))


def test_a_block_of_another_length_is_refused() -> None:
    cache, _ = apart("bthc")
    with pytest.raises(ConfigurationError, match=r"has \(8, 2, 16\) tokens, heads and channels; expected is \(16"):
        PagedKVCache("short", cache.geometry, 16, cache.layers)


def test_slots_number_tokens_through_blocks() -> None:
    assert slots_of([2, 0], 4).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert slots_of([], 4).dtype == np.int64
