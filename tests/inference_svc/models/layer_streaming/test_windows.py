"""Models with sliding windows whose layers are streamed: the bits of the resident model, and pages given back alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.layer_streaming.residency_plan import OFF, StreamingOptions
from inference_svc.models.loader import DEMO_MODEL, LoadedModel, load
from inference_svc.sequence.kv_connector import NullKVConnector
from tests.inference_svc.models.test_architectures import build
from tests.inference_svc.windowed import ALL, LIMITS, PIECE, SOME, WINDOW, Windowed, prompt

FULL = StreamingOptions("full_stream", slots=2, poison_freed_slots=True)


@pytest.fixture(scope="module", params=[ALL, SOME, "Gemma2ForCausalLM"])
def folder(home: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has windows in all layers, or in some."""
    at = tmp_path_factory.mktemp("windowed")
    _, eager, _ = build(request.param, sliding_window=WINDOW, max_position_embeddings=1024)
    eager.save_pretrained(at)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, at / file)
    return at


def loaded(folder: Path, asked: StreamingOptions) -> LoadedModel:
    return load(str(folder), device="cpu", dtype="float32", stream=asked)


def logits(model: LoadedModel) -> list[Tensor]:
    """Of every row of a prompt three windows long that is read in pieces, and of some steps behind it; and the keys."""
    shape = model.layers, model.kv_heads, model.head_dim
    pool = KVPool(*shape, 512, model.dtype, model.device, model.windows)
    decoder, table, ids, found = Decoder(model), pool.allocate(320), prompt(1, 3 * WINDOW), list[Tensor]()
    assert table is not None

    def forward(tokens: list[int], at: int) -> None:
        spans = [forward_batch.SequenceSlice([token], at + i, table, True) for i, token in enumerate(tokens)]
        found.append(decoder(forward_batch.build_batch(spans, pool, model.device)))

    for at in range(0, len(ids), 100):
        forward(ids[at : at + 100], at)
    for step in range(4):
        forward([int(found[-1][-1].argmax())], len(ids) + step)
    return [*found, pool.keys.clone()]


def answers(model: LoadedModel) -> tuple[list[list[int]], int]:
    """Of two long prompts at once, and the most pages that they held."""
    pool = KVPool(model.layers, model.kv_heads, model.head_dim, 2048, model.dtype, model.device, model.windows)
    engine = Windowed(Engine(model, pool, NullKVConnector(), EngineLimits(**LIMITS)), None)
    requests = [engine.request(prompt(2 + i, 700), 24) for i in range(2)]
    found = [request.tokens() for request in requests]
    engine.close()
    pool.check_integrity()
    return found, max(engine.pages)


def test_every_row_has_the_bits_of_the_resident_model(folder: Path) -> None:
    want, model = logits(loaded(folder, OFF)), loaded(folder, FULL)
    assert model.streamed is not None
    assert WINDOW in model.windows
    try:
        got = logits(model)
    finally:
        model.streamed.close()
    assert all(torch.isfinite(x).all() for x in got[:-1]), "a slot was read that had been released"
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_answers_and_pages_are_the_resident_models(folder: Path) -> None:
    want, model = answers(loaded(folder, OFF)), loaded(folder, FULL)
    assert model.streamed is not None
    try:
        assert answers(model) == want
    finally:
        model.streamed.close()
    if None not in model.windows:
        assert want[1] <= 2 * ((WINDOW + PIECE + 64) // 32 + 2), "what no window sees is given back"
