"""Bodies of the largest size, valid and not: what they cost those who wait beside them."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import psutil
import pytest
from kvsidecar.errors import InvalidRequest, Overloaded
from kvsidecar.inference.v1 import inference_pb2 as pb
from pydantic import ValidationError

from benchmarks.node import free_port
from inference_svc.gateway.body_model import BodyModel
from inference_svc.gateway.byte_budget import ByteBudget
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest
from inference_svc.gateway.openai_writer import OpenAIWriter
from inference_svc.gateway.request_runner import ChoiceChunk, share_prompt_logprobs
from inference_svc.gateway.responses_api.response_writer import ResponseWriter
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.tokenize_routes import tokenize_response
from inference_svc.gateway.unsupported_options import parse
from tests.inference_svc.gateway.http_server import listening, said_to

SIZE = 8_000_000
CHAT, TEXT, RESPONSE, CONVERSATIONS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/conversations"


def filled(before: str, part: str, behind: str, size: int = SIZE) -> bytes:
    return (before + ",".join([part] * ((size - 100) // (len(part) + 1))) + behind).encode()


# Refused for their numbers, whatever a class would say of them: 8 MB each.
FLOODS: dict[str, tuple[str, bytes]] = {
    "prompt": (TEXT, filled('{"prompt":[', "{}", "]}")),
    "messages": (CHAT, filled('{"messages":[', "{}", "]}")),
    "stop": (TEXT, filled('{"prompt":"a","stop":[', "1", "]}")),
    "metadata": (RESPONSE, filled('{"input":"hi","metadata":{"a":[', "{}", "]}}")),
    "empty messages": (CHAT, filled('{"messages":[', '{"role":"user","content":""}', "]}")),
    "deep": (TEXT, b'{"a":' * (SIZE // 5)),
}
PART = {"type": "text", "text": "x"}
DIRECTIVES = {"directives": [{"end": i + 1, "priority": 1} for i in range(110)]}
HINTS = {"actions": [{"action_type": "kv.retain", "action_version": "1.0", "payload": DIRECTIVES}] * 10}
SHORT, LONG = ({"role": "user", "content": "x" * size} for size in (100, 1900))
# As much as is allowed, in forms that cost much.
LARGE: dict[str, tuple[str, bytes]] = {
    "a text": (TEXT, json.dumps({"prompt": "so it goes, [on]. " * 440_000}).encode()),
    "an otter": (TEXT, '{"prompt":"%s\U0001f9a6"}'.__mod__("so it goes, on. " * 440_000).encode()),
    "escapes": (TEXT, b'{"prompt":"' + b"\\n" * 3_900_000 + b'"}'),
    "numbers": (TEXT, json.dumps({"prompt": [12345] * 262_000}).encode()),
    "wrong numbers": (TEXT, json.dumps({"prompt": ["a"] * 131_000 + [1] * 131_000}).encode()),
    "members": (TEXT, json.dumps({f"k{i}": 1 for i in range(65_000)}).encode()),
    "members of a message": (CHAT, json.dumps({"messages": [{f"k{i}": 1 for i in range(65_000)}]}).encode()),
    "biases": (TEXT, json.dumps({"prompt": "x", "logit_bias": {f"k{i}": 1 for i in range(65_000)}}).encode()),
    "surrogates": (TEXT, json.dumps({"prompt": ["\U0001f9a6"] * 262_000}).encode()),
    "a conversation": (CHAT, json.dumps({"messages": [{"role": "user", "content": "x" * 220}] * 4096}).encode()),
    "parts": (CHAT, json.dumps({"messages": [{"role": "user", "content": [PART] * 5}] * 3400}).encode()),
    "items": (RESPONSE, json.dumps({"input": [{"role": "user", "content": "x" * 220}] * 4096}).encode()),
    "wrong items": (RESPONSE, json.dumps({"input": [{"type": "message"}] * 4096}).encode()),
    "conversation items": (CONVERSATIONS, json.dumps({"items": [SHORT] * 4096}).encode()),
    "too many items": (CONVERSATIONS, json.dumps({"items": [LONG] * 4096}).encode()),
    "stops of many answers": (TEXT, json.dumps({"prompt": ["x"] * 512, "stop": ["a"] * 200_000}).encode()),
    "tokens of many answers": (TEXT, json.dumps({"prompt": ["x"] * 512, "allowed_token_ids": [5] * 200_000}).encode()),
    "ends of 512 answers": (TEXT, json.dumps({"prompt": ["x"] * 512, "segment_ends": [5] * 3500}).encode()),
    "hints of 512 answers": (TEXT, json.dumps({"prompt": ["x"] * 512, "kv_hints": HINTS}).encode()),
}  # fmt: skip


@pytest.fixture
def small_heap() -> Iterator[None]:
    """What other tests left is not searched for garbage meanwhile: a gateway's process has none of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def longest_turn(asked: asyncio.Task[Any]) -> float:
    """The most processor time between two turns of the loop until the task is done, in seconds."""
    longest = 0.0
    while not asked.done():
        began = time.process_time()
        await asyncio.sleep(0.001)
        longest = max(longest, time.process_time() - began)
    return longest


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("name", [*FLOODS, *LARGE])
async def test_the_event_loop_never_waits_long_for_a_body(name: str) -> None:
    """Measured as processor time between two turns of the loop, so that other processes do not count. It has in it
    what this test's own client does."""
    path, body = (FLOODS | LARGE)[name]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    async with listening() as (port, _):
        asked = asyncio.create_task(said_to(port, head.encode() + body, 60))
        longest = await longest_turn(asked)
        answer = await asked
    code = int(answer.split(b" ", 2)[1])
    valid = (200,) if path == CONVERSATIONS else (400, 503)  # there is no worker
    assert code in ((400,) if name in FLOODS or "wrong" in name or "many" in name else valid), answer[:300]
    assert longest < 0.1


@pytest.mark.usefixtures("small_heap")
async def test_the_event_loop_never_waits_long_for_a_change_of_a_conversation() -> None:
    path, body = LARGE["conversation items"]
    async with listening() as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        path += "/" + (await client.post(path, content=body)).json()["id"]
        last = (await client.get(f"{path}/items")).json()["first_id"]
        for method, place, change in (
            ("POST", "/items", {"items": [{"role": "user", "content": "x"}]}),
            ("POST", "", {"metadata": {"a": "b"}}),
            ("DELETE", f"/items/{last}", None),
        ):
            asked = asyncio.create_task(client.request(method, path + place, json=change))
            assert await longest_turn(asked) < 0.1
            assert (await asked).status_code == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop": ["a"] * 9}, "stop has 9 strings; at most 8 are allowed"),
        ({"allowed_token_ids": [5] * 100_000}, r"the options have 100\d{3} bytes for each of 512 answers; at most"),
    ],
)  # fmt: skip
async def test_options_are_limited_before_each_answer_has_a_copy(options: dict[str, Any], said: str) -> None:
    async with listening() as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        answer = await client.post(TEXT, json={"prompt": ["x"] * 512, **options})
    assert answer.status_code == 400
    assert re.match(said, answer.json()["error"]["message"])


@contextmanager
def bounded_memory(process: psutil.Process) -> Iterator[None]:
    """Assert that the process never has much more memory than at the beginning."""
    idle, peak, done = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert peak - idle <= 150 * 10**6


@pytest.fixture(scope="module")
def alone() -> Iterator[tuple[str, psutil.Process]]:
    """A gateway's process without workers: what is valid is answered with 503."""
    port = free_port()
    command = [sys.executable, "-m", "inference_svc", "gateway", "--workers", "127.0.0.1:1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as gateway:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except httpx.TransportError:
                assert gateway.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", psutil.Process(gateway.pid)
        gateway.terminate()


def test_no_body_takes_much_memory(alone: tuple[str, psutil.Process]) -> None:
    url, process = alone
    with bounded_memory(process):
        codes = {name: httpx.post(url + path, content=body, timeout=60).status_code
                 for name, (path, body) in (FLOODS | LARGE).items()}  # fmt: skip
    assert {codes[name] for name in FLOODS} == {400}
    assert {codes[name] for name in ("a text", "an otter", "numbers", "a conversation", "parts", "items")} == {503}
    assert (codes["conversation items"], codes["too many items"]) == (200, 400)


@pytest.mark.parametrize(
    ("content", "times"), [("x" * 10**6, 1000), ([{"type": "input_text", "text": "x"}] * 8000, 24)]
)
def test_references_to_large_items_take_no_more_memory_than_a_body(
    alone: tuple[str, psutil.Process], content: Any, times: int
) -> None:
    url, process = alone
    item = {"id": "msg_a", "role": "user", "content": content}
    httpx.post(url + CONVERSATIONS, json={"items": [item]}, timeout=60).raise_for_status()
    with bounded_memory(process):
        answer = httpx.post(url + RESPONSE, json={"input": [{"id": "msg_a"}] * times}, timeout=60)
    assert answer.status_code == 400
    assert "the items that input refers to" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "input"


def scored(tokens: int, num_choices: int = 1) -> AsyncIterator[ChoiceChunk]:
    """Whole answers to a prompt, with the log probabilities of its tokens and of 20 alternatives to each."""
    top = [pb.TokenLogprob(token_id=i, text="word", logprob=-i) for i in range(20)]
    found = [pb.TokenLogprob(token_id=5, text="word", logprob=-1, rank=1, top=top)] * tokens
    first, other = pb.GenerateStreamResponse(prompt_logprobs=found), pb.GenerateStreamResponse()
    parts = [ChoiceChunk(i, other if i else first) for i in range(num_choices)]

    async def each() -> AsyncIterator[ChoiceChunk]:
        for part in parts:
            yield part

    return each()


@pytest.mark.usefixtures("small_heap")
async def test_the_event_loop_never_waits_long_for_the_tokens_of_a_text() -> None:
    found = pb.TokenizeResponse(token_ids=[12345] * 10**6, token_names=["word"] * 10**6)
    worker: Any = SimpleNamespace(call=AsyncMock(return_value=found), model=pb.GetModelResponse(context_length=4096))
    asked = asyncio.create_task(tokenize_response(worker, pb.TokenizeRequest(return_token_names=True)))
    assert await longest_turn(asked) < 0.1
    fields = json.loads(bytes((await asked).body))
    assert (fields["count"], len(fields["tokens"]), len(fields["token_strs"])) == (10**6, 10**6, 10**6)


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("options", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
async def test_the_event_loop_never_waits_long_for_log_probabilities(options: dict[str, Any]) -> None:
    writer = OpenAIWriter("id", "demo", None, CompletionRequest(prompt="x", **options))
    asked = asyncio.create_task(writer.whole(scored(12_000), 1))
    assert await longest_turn(asked) < 0.1
    (choice,) = json.loads(bytes((await asked).body))["choices"]
    assert len(choice["prompt_logprobs"] or choice["logprobs"]["top_logprobs"]) == 12_000


@pytest.mark.parametrize(
    ("options", "param"), [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")]
)
async def test_the_log_probabilities_of_all_answers_are_limited(options: dict[str, Any], param: str) -> None:
    asked = CompletionRequest(prompt="x", n=2, **options)
    for tokens in (6000, 7000):
        writer = OpenAIWriter("id", "demo", None, asked)
        answer = writer.whole(share_prompt_logprobs(scored(tokens, 2), 2), 2)
        if tokens == 6000:
            assert len(json.loads(bytes((await answer).body))["choices"]) == 2
            continue
        with pytest.raises(InvalidRequest, match="more than 262144 log probabilities together") as caught:
            await answer
        assert caught.value.param == param


def generated(tokens: int) -> AsyncIterator[ChoiceChunk]:
    """A whole answer with the log probabilities of its tokens and of 20 alternatives to each."""
    top = [pb.TokenLogprob(token_id=i, text="word", token_bytes=b"word", logprob=-i) for i in range(20)]
    found = [pb.TokenLogprob(token_id=5, text="word", token_bytes=b"word", logprob=-1, rank=1, top=top)]
    usage = pb.Usage(prompt_tokens=1, generated_tokens=tokens)

    async def each() -> AsyncIterator[ChoiceChunk]:
        for _ in range(tokens):
            yield ChoiceChunk(0, pb.GenerateStreamResponse(text="word", logprobs=found))
        yield ChoiceChunk(0, pb.GenerateStreamResponse(finish_reason=pb.FINISH_REASON_STOP, usage=usage))

    return each()


def whole_answer(path: str, tokens: int) -> Coroutine[Any, Any, Any]:
    """Encode such an answer. Returns the response, or its body."""
    if path == RESPONSE:
        asked = ResponsesRequest(input="x", top_logprobs=20)
        return ResponseWriter(asked, "m", lambda _: asyncio.sleep(0), [], []).whole(generated(tokens))
    chat: Any = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    request = ChatRequest(**chat) if path == CHAT else CompletionRequest(prompt="x", logprobs=20)
    return OpenAIWriter("id", "demo", None, request).whole(generated(tokens), 1)


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSE])
async def test_the_event_loop_never_waits_long_for_the_log_probabilities_of_answers(path: str) -> None:
    asked = asyncio.create_task(whole_answer(path, 12_000))
    assert await longest_turn(asked) < 0.1
    answer = await asked
    assert bytes(answer if path == RESPONSE else answer.body).count(b'"logprob"') >= (12_000 if path != TEXT else 0)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSE])
async def test_the_log_probabilities_of_answers_are_limited(path: str) -> None:
    with pytest.raises(InvalidRequest, match="the answers have more than 524288 log probabilities") as caught:
        await whole_answer(path, 25_000)
    assert caught.value.param == ("logprobs" if path == TEXT else "top_logprobs")


def schemas(part: Any) -> Iterator[dict[str, Any]]:
    """All schemas within one of pydantic's core."""
    if isinstance(part, dict):
        yield part
        part = list(part.values())
    for one in part if isinstance(part, list | tuple) else ():
        yield from schemas(one)


def kinds(kind: type[BodyModel] = BodyModel) -> Iterator[type[BodyModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from kinds(one)


def test_checking_ends_at_the_first_wrong_element_of_every_list() -> None:
    found = [s for kind in kinds() for s in schemas(kind.__pydantic_core_schema__) if s.get("type") == "list"]
    assert len(found) > 20
    assert all(schema.get("fail_fast") for schema in found)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [{f"k{i}": 1 for i in range(5000)}]}),
        (ChatRequest, {"messages": [{}] * 4096, "stop": [1] * 5000}),
        (CompletionRequest, {"prompt": [[{}] * 5000, {}] * 10, **{f"k{i}": 1 for i in range(5000)}}),
    ],
)
def test_a_body_has_a_few_errors_at_most(kind: type[BodyModel], body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, json.dumps(body).encode(), body)
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() < 20


def test_bodies_on_their_way_are_bounded_for_each_caller_and_for_all() -> None:
    budget = ByteBudget(max_bytes=250, max_bytes_per_caller=100)
    with budget.share("a") as one, budget.share("a") as two, budget.share("b") as other, budget.share("c") as third:
        one.add(60)
        with pytest.raises(Overloaded, match="your requests have 120 bytes"):
            two.add(60)
        other.add(90)
        with pytest.raises(Overloaded, match="all requests together have 270 bytes"):
            third.add(60)
    assert budget.num_bytes == 0
    with budget.share("a") as again:
        again.add(100)


async def test_a_caller_whose_bodies_do_not_end_is_refused_another() -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000\r\n\r\n" + b" " * 1999
    async with listening(max_body_bytes=2048, receive_seconds=60) as (port, _):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for _, writer in held:
            writer.write(half)
            await writer.drain()
        async with asyncio.timeout(30):
            while True:
                answer = await said_to(port, half.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b" ")
                if answer.startswith(b"HTTP/1.1 429"):
                    break
                await asyncio.sleep(0.02)
        assert b"bytes of bodies on their way" in answer
        for _, writer in held:
            writer.close()
