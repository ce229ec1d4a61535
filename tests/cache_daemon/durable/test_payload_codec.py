"""Packing is lossless, pays on a trained model's keys and values, and refuses what is not packed."""

from __future__ import annotations

import contextlib
import random
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT32, ChunkHeader
from kvsidecar.chunk_layout import Geometry, layout_of, new_header

from cache_daemon.durable import payload_codec
from cache_daemon.durable.durable_tier import Put
from tests.cache_daemon.durable.chunks import ROOT, opened, read, store

DEMO_MODEL = Path(__file__).parents[3] / "inference_svc" / "demo_model"
TOKENS = 512


@lru_cache(1)
def trained_chunks() -> tuple[Put, ...]:
    """A chain of chunks with the keys and values that the built-in model has for a text, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()[:6000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : 2 * TOKENS]
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers

    def stacked(tensors: list[torch.Tensor]) -> np.ndarray:
        return torch.stack(tensors).squeeze(1).permute(0, 2, 1, 3).contiguous().view(torch.int16).numpy()

    both = stacked([layer.keys for layer in layers]), stacked([layer.values for layer in layers])
    count, _, heads, width = both[0].shape
    found: list[Put] = []
    for begin in range(0, ids.shape[1], TOKENS):
        tokens = ids[0, begin : begin + TOKENS].tolist()
        header = new_header(Geometry(count, heads, width, DATA_TYPE_BFLOAT16, 16), tokens, begin)
        header.root = ROOT
        header.parent_prefix_hash = found[-1].header.prefix_hash if found else ROOT
        header.prefix_hash = keys.prefix_hash(header.parent_prefix_hash, tokens)
        header.content_hash = keys.content_hash(ROOT, tokens)
        payload = bytearray(header.payload_bytes)
        for section, values in zip(layout_of(header).arrays(memoryview(payload)).values(), both, strict=True):
            section[:] = values[:, begin : begin + TOKENS].view(np.uint16)
        header.checksum = keys.checksum(payload)
        found.append(Put(header, memoryview(payload)))
    return tuple(found)


def round_trip(payload: bytes, element: int) -> bytes | None:
    packed = payload_codec.compress(memoryview(payload), element)
    if packed is not None:
        target = bytearray(len(payload))
        payload_codec.decompress(memoryview(packed), memoryview(target))
        assert target == payload
    return packed


@given(st.integers(0, 3), st.sampled_from([1, 2, 4]), st.integers(0, 600_000))
def test_packing_is_lossless_for_any_length(seed: int, element: int, size: int) -> None:
    noise = np.random.default_rng(seed)
    payload = (noise.normal(size=size // 4 + 1).astype(np.float32).tobytes())[:size]
    round_trip(payload, element)
    round_trip(bytes(size), element)


def test_a_trained_models_keys_and_values_take_11_bits_of_16() -> None:
    for put in trained_chunks():
        packed = round_trip(bytes(put.payload), 2)
        assert packed is not None
        assert 8 * len(packed) / (len(put.payload) / 2) < 11.5


def test_noise_is_stored_as_it_is() -> None:
    assert round_trip(random.Random(1).randbytes(300_000), 2) is None
    assert round_trip(b"", 2) is None


def test_codes_of_8_bits_are_packed_only_when_that_pays() -> None:
    codes = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()
    assert round_trip(codes, 1) is None
    assert round_trip(bytes(100_000), 1) is not None


def test_the_size_of_elements_follows_from_the_header() -> None:
    assert payload_codec.element_bytes(ChunkHeader(bits=16, dtype=DATA_TYPE_BFLOAT16)) == 2
    assert payload_codec.element_bytes(ChunkHeader(bits=16, dtype=DATA_TYPE_FLOAT32)) == 4
    assert payload_codec.element_bytes(ChunkHeader(bits=4, dtype=DATA_TYPE_BFLOAT16)) == 1


@given(st.data())
def test_damaged_packings_are_refused_or_other_bytes_and_never_more(data: st.DataObject) -> None:
    payload = np.arange(40_000, dtype=np.uint16).tobytes()
    packed = bytearray(payload_codec.compress(memoryview(payload), 2) or b"")
    where = data.draw(st.integers(0, len(packed) - 1))
    packed[where] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.sampled_from([0, 0, 1, 100]))
    guard = b"\xa5" * 4096
    memory = bytearray(guard + bytes(len(payload)) + guard)
    target = memoryview(memory)[len(guard) : -len(guard)]
    with contextlib.suppress(ValueError):
        payload_codec.decompress(memoryview(packed)[: len(packed) - cut], target)
    assert memory.startswith(guard)
    assert memory.endswith(guard)


@pytest.mark.parametrize("compression", ["zstd", "none", "auto"])
def test_a_store_gives_back_raw_payloads_whatever_it_does_with_them(tmp_path: Path, compression: str) -> None:
    puts = trained_chunks()
    tier = opened(tmp_path, compression=compression)
    store(tier, *puts)
    raw = sum(len(put.payload) for put in puts)
    assert (tier.usage().live_bytes < 0.75 * raw) == (compression == "zstd")
    assert {result.value for result in read(tier, *puts)} == {"ok"}
    tier.close()
    tier = opened(tmp_path, compression="none")
    assert {result.value for result in read(tier, *puts)} == {"ok"}, "a store reads what another mode wrote"
    tier.close()
