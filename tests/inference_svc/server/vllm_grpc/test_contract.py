"""vLLM's gRPC contract at a real worker: the same answers as by our own protocol, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import socket
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvsidecar.errors import ConfigurationError
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import InferenceServiceStub
from tokenizers import Tokenizer

from inference_svc.server.vllm_grpc import require_contract

vllm = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2", reason="needs kvsidecar[vllm-grpc]")
common = pytest.importorskip("smg_grpc_proto.generated.common_pb2", reason="needs kvsidecar[vllm-grpc]")

if TYPE_CHECKING:
    from tests.inference_svc.server.vllm_grpc.conftest import Door

SERVICE = "vllm.grpc.engine.VllmEngine"
GREEDY = {"temperature": 0.0}
ENDLESS = {"ignore_eos": True, "temperature": 1.0, "seed": 1}


def prompt(seed: int, tokens: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 4000) for _ in range(tokens)]


def tokenized(ids: list[int]) -> Any:
    return vllm.TokenizedInput(input_ids=ids)


def whole(door: Door, ids: list[int], **params: Any) -> Any:
    """The one answer to a request that is not streamed."""
    (only,) = door.ask(tokenized=tokenized(ids), sampling_params=vllm.SamplingParams(**params))
    return only.complete


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (GREEDY, {"temperature": 0}),
        ({"temperature": 0.75, "seed": 7, "top_p": 0.5, "top_k": 20}, None),
        ({"seed": 5, "min_p": 0.0625, "repetition_penalty": 1.25, "presence_penalty": 0.5}, {"temperature": 1.0}),
        ({"seed": -3, "frequency_penalty": 0.5, "logit_bias": {300: 5.0}}, {"seed": 2**64 - 3, "temperature": 1.0}),
        ({**GREEDY, "ignore_eos": True, "min_tokens": 9}, {"temperature": 0}),
    ],
)
def test_tokens_are_those_of_our_own_protocol(door: Door, theirs: dict[str, Any], ours: dict[str, Any] | None) -> None:
    own = door.node.client().generate(prompt(1), max_tokens=24, logprobs=3, **{**theirs, **(ours or {})})
    found = whole(door, prompt(1), max_tokens=24, logprobs=3, **theirs)
    assert list(found.output_ids) == [token.token_id for token in own.logprobs]
    assert list(found.output_logprobs.token_ids) == list(found.output_ids)
    assert list(found.output_logprobs.token_logprobs) == [token.logprob for token in own.logprobs]
    assert [list(top.token_ids) for top in found.output_logprobs.top_logprobs] == [
        [one.token_id for one in token.top] for token in own.logprobs
    ]
    assert found.prompt_tokens == 40
    assert found.completion_tokens == len(found.output_ids)


def test_a_stream_is_the_whole_in_pieces(door: Door) -> None:
    params = vllm.SamplingParams(max_tokens=20, ignore_eos=True, seed=3, logprobs=2, prompt_logprobs=1, n=3)
    fields = {"tokenized": tokenized(prompt(2)), "sampling_params": params}
    wholes = {part.complete.index: part.complete for part in door.ask(**fields)}
    assert sorted(wholes) == [0, 1, 2]
    assert len({tuple(one.output_ids) for one in wholes.values()}) == 3, "each choice has a seed of its own"
    parts = door.ask(stream=True, **fields)
    ends = [part.complete for part in parts if part.WhichOneof("response") == "complete"]
    assert {end.index: end for end in ends} == wholes
    for index, end in wholes.items():
        pieces = [p.chunk for p in parts if p.WhichOneof("response") == "chunk" and p.chunk.index == index]
        assert [token for piece in pieces for token in piece.token_ids] == list(end.output_ids)
        assert sum(piece.completion_tokens for piece in pieces) == end.completion_tokens == 20
        assert [p for piece in pieces for p in piece.output_logprobs.token_logprobs] == list(
            end.output_logprobs.token_logprobs
        )
        assert pieces[0].input_logprobs == end.input_logprobs
        assert not any(piece.HasField("input_logprobs") for piece in pieces[1:])
        assert {piece.prompt_tokens for piece in pieces} == {40}
        assert list(end.input_logprobs.token_ids) == prompt(2)
        assert not end.input_logprobs.token_logprobs[0].HasField("value")
        assert all(one.value < 0 for one in end.input_logprobs.token_logprobs[1:])
        assert end.finish_reason == "length"


def test_what_was_read_before_is_told(door: Door) -> None:
    ids = prompt(3, 600)
    first = whole(door, ids, max_tokens=4, **GREEDY)
    door.node.settle()
    second = whole(door, ids, max_tokens=4, **GREEDY)
    assert first.cached_tokens == 0
    assert second.cached_tokens > 500
    assert first.output_ids == second.output_ids


def test_text_is_read_as_our_own_protocol_reads_it(door: Door) -> None:
    own = door.node.client().generate("hello there", max_tokens=8, temperature=0, logprobs=0)
    (found,) = door.ask(text="hello there", sampling_params=vllm.SamplingParams(max_tokens=8, **GREEDY))
    assert list(found.complete.output_ids) == [token.token_id for token in own.logprobs]
    assert found.complete.prompt_tokens == len(door.node.client().tokenize("hello there"))


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        ({"regex": "[ab]{3,9}"}, lambda text: re.fullmatch("[ab]{3,9}", text)),
        ({"choice": vllm.ChoiceConstraint(choices=["yes", "no"])}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "x"+ "y"'}, lambda text: re.match("x+y?", text)),
        ({"json_schema": '{"enum": [12, "twelve"]}'}, lambda text: json.loads(text) in (12, "twelve")),
        ({"json_object": True}, lambda text: text.startswith("{")),
    ],
)
def test_constraints_are_kept_to(door: Door, constraint: dict[str, Any], matches: Callable[[str], Any]) -> None:
    found = whole(door, prompt(4), max_tokens=60, seed=2, **constraint)
    assert matches(door.node.client().detokenize(list(found.output_ids)).removesuffix("<|end|>").strip()), found


def test_what_ended_an_answer_is_named(door: Door) -> None:
    free = whole(door, prompt(5), max_tokens=30, **GREEDY, ignore_eos=True)
    assert (free.finish_reason, free.WhichOneof("matched_stop")) == ("length", None)
    stop = free.output_ids[10]
    ended = whole(door, prompt(5), max_tokens=30, **GREEDY, ignore_eos=True, stop_token_ids=[stop])
    assert (ended.finish_reason, ended.matched_token_id) == ("stop", stop)
    assert list(ended.output_ids) == list(free.output_ids)[: list(free.output_ids).index(stop) + 1]
    text = door.node.client().detokenize(list(free.output_ids)[:12])[-3:]
    ended = whole(door, prompt(5), max_tokens=30, **GREEDY, ignore_eos=True, stop=[text])
    assert (ended.finish_reason, ended.matched_stop_str) == ("stop", text)


def test_without_max_tokens_an_answer_may_fill_the_context(door: Door) -> None:
    found = whole(door, prompt(6, 4000), **ENDLESS)
    assert (found.finish_reason, found.completion_tokens) == ("length", 96)
    cut = whole(door, prompt(6, 5000), **ENDLESS, max_tokens=5, truncate_prompt_tokens=-1)
    assert (cut.prompt_tokens, cut.completion_tokens) == (4091, 5)


# ---- ends ----------------------------------------------------------------------------------------------------


def idle(door: Door) -> bool:
    stats = door.node.client().stats()
    return not stats.running and not stats.waiting and stats.pool_free_pages == stats.pool_pages


def test_abort_ends_a_request_and_frees_its_pages(door: Door) -> None:
    params = vllm.SamplingParams(**ENDLESS, n=4)
    request = vllm.GenerateRequest(
        request_id="long", tokenized=tokenized(prompt(7)), sampling_params=params, stream=True
    )
    stream = door.stub.Generate(request, timeout=120)
    first = next(stream)
    door.stub.Abort(vllm.AbortRequest(request_ids=["nobody", "", "long"]), timeout=60)
    ends = [part.complete for part in stream if part.WhichOneof("response") == "complete"]
    assert first.WhichOneof("response") == "chunk"
    assert sorted((end.index, end.finish_reason) for end in ends) == [(i, "abort") for i in range(4)]
    assert all(len(end.output_ids) == end.completion_tokens for end in ends)
    eventually(lambda: idle(door))


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_cancelled_frees_its_pages(door: Door, stream: bool) -> None:
    before = door.node.client().stats()
    params = vllm.SamplingParams(**ENDLESS, n=2)
    call = door.stub.Generate(
        vllm.GenerateRequest(tokenized=tokenized(prompt(8)), sampling_params=params, stream=stream)
    )
    if stream:
        next(call)
    eventually(lambda: door.node.client().stats().running == 2)
    call.cancel()
    eventually(lambda: door.node.client().stats().cancelled == before.cancelled + 2)
    eventually(lambda: idle(door))


# ---- refused -------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structural_tag": "{}"}, "structural_tag is not supported by this server"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"top_p": 2.0}, "top_p is 2.0"),
    ({"top_k": 2**31}, "top_k is 2147483648"),
    ({"n": 9}, "n is 9; at most 8 are allowed"),
    ({"logprobs": -1}, "logprobs is -1; allowed are 0 to 20"),
    ({"logprobs": 21}, "logprobs is 21; allowed are 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1; allowed are 0 to 20"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias has token -1"),
    ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
    ({"repetition_penalty": 1e-38}, "allowed are 0.01 to 10"),
    ({"max_tokens": 0}, "max_tokens is 0; at least 1 is needed"),
    ({"min_tokens": 10**6}, "min_tokens is 1000000"),
    ({"stop": [""]}, "stop has an empty string"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids has token 1000000"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
    ({"regex": "("}, "regex"),
    ({"json_schema": "{"}, "the JSON schema is not JSON"),
    ({"json_schema": ""}, "the JSON schema is not JSON"),
    ({"grammar": "no grammar"}, "grammar"),
    ({"choice": vllm.ChoiceConstraint()}, "choice"),
]


def status(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(("params", "named"), REFUSED)
def test_what_cannot_be_kept_to_is_refused_by_its_name(door: Door, params: dict[str, Any], named: str) -> None:
    code, said = status(lambda: whole(door, prompt(9), **{"max_tokens": 2, **params}))
    assert (code, named in said) == (grpc.StatusCode.INVALID_ARGUMENT, True), said


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "the prompt is missing"),
        ({"tokenized": vllm.TokenizedInput(original_text="text alone")}, "the prompt is empty"),
        ({"tokenized": tokenized([2**32 - 1])}, "token id 4294967295 is outside the vocabulary"),
        ({"tokenized": tokenized([5] * 5000)}, "the prompt is too long: it has 5000 tokens"),
        ({"text": "a", "request_id": "x" * 129}, "request_id has 129 characters"),
        ({"text": "a", "data_parallel_rank": 1}, "data_parallel_rank is 1"),
        ({"text": "a", "mm_inputs": vllm.MultimodalInputs()}, "mm_inputs is not supported"),
        ({"text": "a", "extra_mm_inputs": [vllm.MultimodalInputs()]}, "extra_mm_inputs is not supported"),
        ({"text": "a", "media_refs": vllm.MediaRefs()}, "media_refs is not supported"),
        ({"text": "a", "kv_transfer_params": vllm.KvTransferParams()}, "kv_transfer_params is not supported"),
        ({"text": "a", "kv_transfer_params_json": "{}"}, "kv_transfer_params_json is not supported"),
    ],
)
def test_requests_that_are_none_are_refused(door: Door, fields: dict[str, Any], named: str) -> None:
    code, said = status(lambda: door.ask(**fields))
    assert (code, named in said) == (grpc.StatusCode.INVALID_ARGUMENT, True), said


def test_garbage_harms_nobody(door: Door) -> None:
    send = door.channel.unary_stream(f"/{SERVICE}/Generate", lambda sent: sent, lambda got: got)
    rng = random.Random(0)
    for _ in range(50):
        code, _ = status(lambda: list(send(rng.randbytes(rng.randrange(1, 200)), timeout=60)))
        assert code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN)
    with socket.create_connection(("127.0.0.1", int(door.address.rpartition(":")[2]))) as other:
        other.sendall(rng.randbytes(4096))
    assert whole(door, prompt(10), max_tokens=3, **ENDLESS).completion_tokens == 3
    eventually(lambda: idle(door))


def test_what_there_is_not_is_said_in_a_sentence(door: Door) -> None:
    for call, named in (
        (lambda: door.stub.Embed(vllm.EmbedRequest(), timeout=60), "embeds nothing"),
        (lambda: door.stub.FlushCache(common.FlushCacheRequest(), timeout=60), "the cache is the node's"),
        (lambda: door.stub.StartProfile(common.StartProfileRequest(), timeout=60), "no profiler"),
        (lambda: door.stub.StopProfile(common.StopProfileRequest(), timeout=60), "no profiler"),
    ):
        code, said = status(call)
        assert (code, named in said) == (grpc.StatusCode.UNIMPLEMENTED, True), said


# ---- what is held --------------------------------------------------------------------------------------------


def stored_tokens(stream: Any, wanted: list[int], tier: int) -> list[int]:
    """Reads events until the whole blocks of a prompt are stored in a tier; the numbers of the batches read."""
    blocks: dict[int, tuple[int | None, list[int]]] = {}
    numbers = []
    for batch in stream:
        numbers.append(batch.sequence_number)
        for event in batch.events:
            if event.HasField("cleared"):
                blocks.clear()
            if event.HasField("stored") and event.stored.tier == tier:
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                for block in event.stored.blocks:
                    assert len(block.token_ids) == block.block_size == 32
                    blocks[block.block_hash] = parent, list(block.token_ids)
                    parent = block.block_hash
        if any(prefix(blocks, name) == wanted for name in blocks):
            return numbers
    raise AssertionError("the stream ended before")


def prefix(blocks: dict[int, tuple[int | None, list[int]]], name: int | None) -> list[int]:
    """The tokens up to the end of a block; of a chain with a gap, none."""
    found: list[int] = []
    while name is not None:
        if name not in blocks:
            return []
        name, tokens = blocks[name]
        found = tokens + found
    return found


def test_a_router_hears_what_the_daemon_holds(door: Door) -> None:
    def subscribed(after: int) -> Any:
        return door.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=after), timeout=150)

    early = subscribed(0)
    first = next(early)
    assert (first.sequence_number, first.events[0].WhichOneof("data")) == (1, "cleared")
    ids = prompt(20, 320)
    whole(door, ids, max_tokens=2, **GREEDY)
    numbers = stored_tokens(early, ids, common.KV_CACHE_TIER_HOST)
    assert numbers == list(range(2, len(numbers) + 2))
    late = subscribed(41)
    assert stored_tokens(late, ids, common.KV_CACHE_TIER_HOST)[0] == 42
    others = [subscribed(0) for _ in range(6)]
    for other in others:
        next(other)
    code, said = status(lambda: next(subscribed(0)))
    assert (code, said) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "8 routers follow events already")
    for stream in (early, late, *others):
        stream.cancel()

    def room() -> bool:
        again = subscribed(0)
        try:
            return next(again).sequence_number == 1
        except grpc.RpcError:
            return False
        finally:
            again.cancel()

    eventually(room)


# ---- state ---------------------------------------------------------------------------------------------------


def test_a_router_learns_what_is_served(door: Door) -> None:
    assert door.stub.HealthCheck(vllm.HealthCheckRequest(), timeout=60).healthy
    model, own = door.stub.GetModelInfo(vllm.GetModelInfoRequest(), timeout=60), door.node.client().model()
    assert (model.served_model_name, model.vocab_size) == (own.model_id, own.vocab_size)
    assert model.max_context_length == own.context_length
    assert model.is_generation
    assert (Path(model.tokenizer_path) / "tokenizer.json").is_file()
    server = door.stub.GetServerInfo(vllm.GetServerInfoRequest(), timeout=60)
    assert (server.server_type, server.data_parallel_size) == ("kvsidecar", 1)
    (load,) = door.stub.GetLoads(vllm.GetLoadsRequest(), timeout=60).loads
    assert load.max_total_num_tokens > 4096
    assert load.max_running_requests == server.max_num_seqs == 64


def test_a_router_gets_the_tokenizer(door: Door) -> None:
    chunks = list(door.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=60))
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert "chat_template.jinja" in archive.namelist()
        assert not [name for name in archive.namelist() if name.endswith(".safetensors")]
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    assert tokenizer.encode("hello there").ids == door.node.client().tokenize("hello there")


def test_the_door_answers_nothing_else(door: Door) -> None:
    code, _ = status(lambda: InferenceServiceStub(door.channel).GetStats(pb.GetStatsRequest(), timeout=60))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    health = health_pb2_grpc.HealthStub(door.channel)
    for name in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    listed = reflection_pb2_grpc.ServerReflectionStub(door.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=60
    )
    assert SERVICE in [one.name for one in next(listed).list_services_response.service]


def test_without_the_contracts_package_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_contract()
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    with pytest.raises(ConfigurationError, match=re.escape("pip install 'kvsidecar[vllm-grpc]'")):
        require_contract()
