"""Ends and small accounts that were wrong."""

from __future__ import annotations

import pytest
import torch
from kvsidecar.cache.v1 import cache_pb2

from inference_svc.engine.engine_events import EngineTask
from inference_svc.engine.engine_stats import EngineStats
from inference_svc.engine.request_lifecycle import RequestFinisher, append_token
from inference_svc.kv_client.load_cost_model import LoadCostModel
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import PrefixCache
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.layerwise_load import LayerLoadFailed, LayerReadyEvent
from inference_svc.models.loader import load
from inference_svc.sampling.logprobs import SampledToken
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import GenerationRequest
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.kv_pool.test_prefix_cache import answer
from tests.inference_svc.sequence.test_detokenizer import TOKENIZER
from tests.inference_svc.server.test_load import Request, idle, small_engine


def test_a_stop_string_in_what_was_held_back_is_a_stop() -> None:
    """Half a character is held back; when nothing more comes, it is shown as one that stops the answer."""
    half = TOKENIZER("é", add_special_tokens=False)["input_ids"][0]
    broken = next(i for i in [half, *range(300)] if TOKENIZER.decode([i]) == "\ufffd")
    outputs: list[SequenceOutput] = []
    text = IncrementalDetokenizer(TOKENIZER, ("\ufffd",), frozenset())
    sequence = Sequence(GenerationRequest("s", 2, 1, SamplingParams(), frozenset()), [5, 6], text, outputs.append)
    assert append_token(sequence, SampledToken(broken), 100) is FinishReason.STOP
    assert (outputs[-1].text, outputs[-1].finish) == ("", FinishReason.STOP)


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_is_shown_only_on_request(include_stop: bool) -> None:
    stop, outputs = TOKENIZER("a", add_special_tokens=False)["input_ids"][0], list[SequenceOutput]()
    request = GenerationRequest("s", 2, 9, SamplingParams(), frozenset([stop]), include_stop=include_stop)
    text = IncrementalDetokenizer(TOKENIZER, (), frozenset())
    sequence = Sequence(request, [5, 6], text, outputs.append)
    assert append_token(sequence, SampledToken(stop), 100) is FinishReason.STOP
    assert outputs[-1].text == ("a" if include_stop else "")


@pytest.mark.parametrize("loaded", [False, True])
def test_a_cancelled_sequence_is_kept_only_with_all_its_layers(loaded: bool) -> None:
    pool, request = KVPool(2, 1, 2, 512, torch.float32, torch.device("cpu")), Request(prompt(1, 100), 5)
    cache, sequence = PrefixCache(pool, 8), request.sequence
    table, layers = pool.allocate(100), LayerReadyEvent(2)
    assert table is not None
    layers.open(2 if loaded else 1)
    layers.fail()
    sequence.kv.load(96, table, None)
    sequence.kv.layers = layers
    RequestFinisher(pool, cache, NullKVConnector(), EngineStats()).cancel(sequence)
    assert len(cache) == loaded
    assert pool.references_match(cache.tables)
    assert request.outputs[-1].finish is FinishReason.CANCELLED


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    out = IncrementalDetokenizer(TOKENIZER, (), frozenset())
    shown = "".join(out.push(i) for i in (TOKENIZER("a")["input_ids"][0], len(TOKENIZER), 150_000))
    assert shown + out.finish() == "a"
    assert out._decode([len(TOKENIZER)]) == ""


def test_a_request_that_stores_nothing_leaves_residents_alone() -> None:
    engine = small_engine(2048)
    ids = prompt(1, 200)
    answer(engine, ids)
    longer = [*ids, 7, 8, 9]
    assert answer(engine, longer, write=False)[1] >= 192
    assert engine.resident_sequences == 1
    assert answer(engine, ids)[1] == 199
    engine.check_integrity()
    engine.stop()


def test_a_failed_reload_is_no_corrupt_prefix() -> None:
    """A preempted sequence keeps the reason of its first miss, also if the daemon ends before the reload."""
    engine, request = small_engine(2048), Request(prompt(1, 100), 5)
    core, sink = engine._core, request.sequence.sink
    request.sequence.set_miss(cache_pb2.MissReason(kind=cache_pb2.MISS_KIND_NEVER_SEEN))

    def fail_reload(output: SequenceOutput) -> None:
        sink(output)
        if len(request.outputs) == 2:
            engine._events.post(EngineTask(lambda: core._compute_uncached(request.sequence), lambda _: None))

    request.sequence.sink = fail_reload
    engine.submit(request.sequence)
    assert len(request.tokens()) == 5
    idle(engine)
    assert engine.stats.preemptions == 1
    assert engine.stats.misses.as_tuples() == [("never_seen", 1, 100)]
    engine.stop()


def test_a_few_tokens_behind_a_hit_say_nothing_of_what_a_token_costs() -> None:
    economy = LoadCostModel()
    assert economy.seconds_per_token(1, 0.032) == pytest.approx(0.001)
    economy.record_prefill(1000, 0.5)
    economy.record_prefill(1, 0.03)
    assert economy.seconds_per_token(1, 0.03) == pytest.approx(0.0005)
    assert economy.seconds_per_token(100, 0.1) == pytest.approx(0.001)


def test_a_layer_is_written_only_behind_its_gate() -> None:
    """What is still being loaded would be written over what a repair computed."""
    loaded = load("demo", dtype="float32")
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 256, loaded.dtype, loaded.device)
    table, gate = pool.allocate(64), LayerReadyEvent(loaded.layers)
    assert table is not None
    gate.fail()
    span = forward_batch.SequenceSlice([5, 6, 7], 20, table, True, gate=gate)
    decoder = Decoder(loaded)
    with pytest.raises(LayerLoadFailed):
        decoder(forward_batch.build_batch([span], pool, loaded.device))
    assert not torch.count_nonzero(pool.keys[:, :, table.slots(0, 64)])
