"""The service in front of an engine, in one process: what it refuses, and what it keeps off its event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvsidecar.errors import InvalidRequest, PromptTooLong
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import to_prompt, to_request

from inference_svc.context_reuse.chunking import DocumentMarks, new_chunker
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest
from inference_svc.gateway.unsupported_options import parse
from inference_svc.request.prompt_tokenizer import PromptTokenizer
from inference_svc.server.inference_service import InferenceService
from inference_svc.server.runtime import Runtime, build_runtime
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.server.worker_metrics import WorkerCollector
from inference_svc.structured_output.grammar_compiler import GrammarCompiler


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder: Path = tmp_path_factory.mktemp("worker")
    config = WorkerConfig(
        model="demo", socket=folder / "w.sock", cache_socket=None, pool_bytes=32 << 20, document_separator="llo"
    )
    found = build_runtime(config)
    yield found
    found.close()


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The threads on which texts were tokenized, and the texts' lengths."""
    real, seen = PromptTokenizer.ids, list[tuple[str, int]]()

    def noted(tokenizer: PromptTokenizer, text: str, special: bool) -> list[int]:
        seen.append((threading.current_thread().name, len(text)))
        return real(tokenizer, text, special)

    monkeypatch.setattr(PromptTokenizer, "ids", noted)
    return seen


async def generated(service: InferenceService, request: pb.GenerateRequest) -> list[pb.GenerateStreamResponse]:
    return [part async for part in service._generate(request)]


async def test_prompts_are_read_beside_the_event_loop(runtime: Runtime, tokenized: list[tuple[str, int]]) -> None:
    service = InferenceService(runtime)
    chat = [{"role": "user", "content": "hello there"}]
    for prompt in ("some text", chat):
        parts = await generated(service, to_request(prompt, max_tokens=2))
        assert parts[-1].usage.prompt_tokens > 0
    context: Any = None
    await service.Tokenize(pb.TokenizeRequest(prompt=to_prompt("text")), context)
    await service.Warm(pb.WarmRequest(prompt=to_prompt("text")), context)
    await service.Warm(pb.WarmRequest(prompt=to_prompt("text"), prefetch=True), context)
    assert len(tokenized) >= 4
    assert all(name.startswith("tokenize") for name, _ in tokenized)


async def test_names_of_tokens_are_read_beside_the_event_loop(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, threads = PromptTokenizer.token_names, list[str]()
    context: Any = None

    def noted(tokenizer: PromptTokenizer, ids: list[int]) -> list[str]:
        threads.append(threading.current_thread().name)
        return real(tokenizer, ids)

    monkeypatch.setattr(PromptTokenizer, "token_names", noted)
    asked = pb.TokenizeRequest(prompt=to_prompt("some text"), return_token_names=True)
    found = await InferenceService(runtime).Tokenize(asked, context)
    assert len(found.token_names) == len(found.token_ids) > 0
    assert threads
    assert all(name.startswith("tokenize") for name in threads)


async def test_slow_grammars_keep_no_other_request_waiting(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients whose grammars take as long as they may; the next one sends none."""
    service, steering = InferenceService(runtime), GrammarCompiler.compile
    asked, go_on = threading.Semaphore(0), threading.Event()

    def slow(grammars: GrammarCompiler, grammar: pb.Grammar) -> Any:
        asked.release()
        assert go_on.wait(100)
        return steering(grammars, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    request = to_request("some text", max_tokens=2)
    request.grammar.regex = "a+"
    steered = [asyncio.create_task(generated(service, request)) for _ in range(2)]
    try:
        for _ in steered:
            assert await asyncio.to_thread(asked.acquire, timeout=60)
        plain = await asyncio.wait_for(generated(service, to_request("other text", max_tokens=2)), 60)
        assert plain[-1].usage.generated_tokens > 0
        assert not any(task.done() for task in steered)
    finally:
        go_on.set()
    for parts in await asyncio.gather(*steered):
        assert set("".join(part.text for part in parts)) == {"a"}


async def counted(runtime: Runtime, tokens: int) -> None:
    """The engine's thread counts a pass when it has handed out what the pass gave: an answer may end before that."""
    deadline = time.monotonic() + 60
    while runtime.engine.speculator.stats.draft_tokens != tokens:
        assert time.monotonic() < deadline, (runtime.engine.speculator.stats, tokens)
        await asyncio.sleep(0.01)


async def test_guesses_are_counted_for_a_request_and_for_the_worker(runtime: Runtime) -> None:
    service = InferenceService(runtime)
    ids = [*range(100, 130), *range(100, 110)]
    asked = to_request(ids, max_tokens=40, temperature=0, ignore_eos=True, speculation="ngram")
    usage = (await generated(service, asked))[-1].usage
    assert usage.draft_tokens >= usage.accepted_tokens
    assert usage.draft_tokens > 0
    await counted(runtime, usage.draft_tokens)
    found = {metric.name: metric for metric in WorkerCollector(runtime).collect()}
    assert found["kvsidecar_worker_spec_decode_num_draft_tokens"].samples[0].value == usage.draft_tokens
    places = found["kvsidecar_worker_spec_decode_num_accepted_tokens_per_pos"].samples
    assert sum(sample.value for sample in places) == usage.accepted_tokens
    with pytest.raises(InvalidRequest, match="this worker has no draft model; start it with --draft-model"):
        await generated(service, to_request(ids, speculation="draft"))
    branches = runtime.engine.speculator.stats.branches
    chain = to_request(ids, max_tokens=40, temperature=0, ignore_eos=True, speculation="ngram", speculation_branches=1)
    more = (await generated(service, chain))[-1].usage
    await counted(runtime, usage.draft_tokens + more.draft_tokens)
    assert runtime.engine.speculator.stats.branches == branches
    assert found["kvsidecar_worker_spec_decode_num_branches"].samples[0].value == branches
    with pytest.raises(InvalidRequest, match="speculation_branches is 5; allowed are 1 to 4"):
        await generated(service, to_request(ids, speculation_branches=5))
    with pytest.raises(InvalidRequest, match="speculation is 'never'; allowed are off, ngram, draft, auto"):
        to_request(ids, speculation="never")


async def test_a_huge_prompt_is_refused_unread_and_leaves_no_memory(
    runtime: Runtime, tokenized: list[tuple[str, int]]
) -> None:
    service = InferenceService(runtime)
    before = psutil.Process().memory_info().rss
    text = "hello there " * 700_000
    for prompt in (text, [{"role": "user", "content": text}], [5] * 1_000_000):
        with pytest.raises(PromptTooLong, match="the prompt is too long: it has"):
            await generated(service, to_request(prompt))
    assert not tokenized
    del text, prompt
    assert psutil.Process().memory_info().rss - before < 200 << 20


async def test_a_prompt_that_hardly_fits_is_counted_in_pieces(
    runtime: Runtime, tokenized: list[tuple[str, int]]
) -> None:
    """Short enough that very long tokens could make it fit, which these are not."""
    service = InferenceService(runtime)
    with pytest.raises(PromptTooLong, match="first 32768 characters have about"):
        await generated(service, to_request("a b c d " * 5000))
    assert max(length for _, length in tokenized) <= 32768


async def test_the_workers_document_separator_is_what_it_tokenizes_by(runtime: Runtime) -> None:
    service = InferenceService(runtime)
    context: Any = None
    whole = await service.Tokenize(pb.TokenizeRequest(prompt=to_prompt("hello there")), context)
    tokenizer = runtime.engine.loaded.tokenizer
    first = tokenizer("he", add_special_tokens=True)["input_ids"]
    assert list(whole.token_ids) == first + tokenizer("llo there", add_special_tokens=False)["input_ids"]
    assert list(whole.token_ids) != tokenizer("hello there")["input_ids"], "the text shows nothing"


COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 5_000_000_000}, "max_tokens is 5000000000"),
    ({"top_k": 2**33}, "top_k is 8589934592"),
    ({"segment_ends": [-1]}, r"segment_ends\.0 is -1"),
    ({"prompt": "a\ud800"}, r"prompt has the lone surrogate U\+D800 at character 1"),
    ({"prompt": ["fine", "\udfff"]}, r"prompt\.1 has the lone surrogate U\+DFFF"),
    ({"stop": ["\ud800"]}, r"stop\.0 has the lone surrogate"),
    ({"cache_salt": "\ud800"}, "cache_salt has the lone surrogate"),
    ({"cache_ttl_seconds": 0}, "cache_ttl_seconds is 0"),
    ({"cache_ttl_seconds": 2_592_001}, "cache_ttl_seconds is 2592001"),
    ({"cache_ttl_seconds": 1.5}, "cache_ttl_seconds is 1.5"),
    ({"\ud800": 1}, r"\\ud800 has the lone surrogate"),
    ({"model": "\ud800"}, "model has the lone surrogate"),
]


def parsed(kind: type[Any], body: dict[str, Any]) -> Any:
    return parse(kind, json.dumps(body).encode(), body)


@pytest.mark.parametrize(("given", "named"), COMPLETION)
def test_what_no_message_holds_is_refused_by_its_field(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        parsed(CompletionRequest, {"prompt": "x", **given})
    str(caught.value).encode()


def test_a_lone_surrogate_in_a_message_is_named() -> None:
    for content in ("\ud800", [{"type": "text", "text": "\ud800"}]):
        with pytest.raises(InvalidRequest, match=r"messages\.0\.content.*lone surrogate"):
            parsed(ChatRequest, {"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("x", {"max_tokens": 5_000_000_000}, "max_tokens is 5000000000"),
        ("x", {"top_k": 2**33}, "top_k is 8589934592"),
        ([1, 2], {"segment_ends": [-1]}, "segment_ends is -1"),
        ("\ud800", {}, "prompt has the lone surrogate"),
        ([{"role": "user", "content": "\ud800"}], {}, "content has the lone surrogate"),
        ("x", {"stop": ["\ud800"]}, "stop has the lone surrogate"),
    ],
)
def test_the_client_names_them_too(prompt: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        to_request(prompt, **options)


@pytest.mark.parametrize("strategy", ["document", "content_defined", "fixed"])
def test_no_chunk_is_longer_than_the_format_allows(strategy: Any) -> None:
    ends = new_chunker(strategy, 4096, [7], frozenset()).ends([5] * 20_000, DocumentMarks())
    assert max(b - a for a, b in zip([0, *ends], ends, strict=False)) <= 4096
