"""OpenAI's and vLLM's fields of chats and completions: the SDK's parameters, token ids, usage, tools, cache options."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel

from inference_svc.gateway.fleet.fleet_router import prompt_prefix_hashes
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest
from inference_svc.gateway.prompt_cache_options import retention_seconds
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.unsupported_options import IGNORED, NEUTRAL
from inference_svc.gateway.worker_router import Worker, WorkerRouter
from tests.inference_svc.gateway.conftest import Gateway

SAID: Any = [{"role": "user", "content": "hello there, tell me something"}]
WEATHER: Any = {
    "name": "get_weather",
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip
CLOCK: Any = {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]


def events(gateway: Gateway, path: str, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{gateway.url}{path}", json={**body, "stream": True}, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (ChatParams, ChatRequest),
        (CompletionCreateParamsNonStreaming, CompletionRequest),
        (ResponseCreateParamsNonStreaming, ResponsesRequest),
    ],
)
def test_parameters_of_the_sdk_are_honoured_advisory_or_refused(params: Any, kind: type[BaseModel]) -> None:
    known = {*kind.model_fields, *IGNORED, *NEUTRAL}
    assert set(params.__annotations__) - known == set()


NEUTRAL_CHAT: dict[str, Any] = {
    "audio": None, "frequency_penalty": 0, "function_call": "auto", "functions": [], "logit_bias": {},
    "logprobs": False, "max_completion_tokens": 4, "max_tokens": 4, "metadata": {"a": "b"}, "modalities": ["text"],
    "moderation": None, "n": 1, "parallel_tool_calls": True, "prediction": None, "presence_penalty": 0,
    "prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "in_memory", "reasoning_effort": "high", "response_format": {"type": "text"},
    "safety_identifier": "s", "seed": 1, "service_tier": "auto", "stop": None, "store": False, "stream": False,
    "temperature": 1, "tool_choice": "auto", "tools": [], "top_logprobs": None, "top_p": 1, "user": "u",
    "verbosity": "low", "stream_options": None, "web_search_options": None,
}  # fmt: skip


def test_the_sdk_with_every_parameter_at_a_neutral_value(gateway: Gateway) -> None:
    assert set(NEUTRAL_CHAT) == set(ChatParams.__annotations__) - {"model", "messages"}
    answer: Any = gateway.client.chat.completions.create(model="demo", messages=SAID, **NEUTRAL_CHAT)
    assert answer.usage.total_tokens > 0
    words = gateway.client.completions.create(
        model="demo", prompt="hello", best_of=1, echo=False, frequency_penalty=0, logit_bias={}, logprobs=None,
        max_tokens=4, n=1, presence_penalty=0, seed=1, stop=None, stream=False, stream_options=None, suffix="",
        temperature=1, top_p=1, user="u",
    )  # fmt: skip
    assert words.usage is not None


@pytest.mark.parametrize("value", ["none", "minimal", "xhigh", 7, {"deep": [1]}])
def test_an_advisory_field_is_never_an_error(gateway: Gateway, value: Any) -> None:
    names = (
        "reasoning_effort", "verbosity", "include_reasoning", "separate_reasoning", "prompt_cache_options",
        "prompt_cache_key", "prompt_cache_retention", "client_metadata",
    )  # fmt: skip
    found = gateway.post("/v1/chat/completions", messages=SAID, max_tokens=2, **dict.fromkeys(names, value))
    assert found["usage"]["completion_tokens"] > 0


def test_a_field_that_cannot_be_honoured_is_refused_with_its_allowed_values(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match=r"modalities .* allowed is null or \[.*text"):
        gateway.client.post("/chat/completions", body={"messages": SAID, "modalities": ["audio"]}, cast_to=object)


@pytest.mark.parametrize(("path", "prompt"), [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")])
def test_usage_in_every_event(gateway: Gateway, path: str, prompt: str) -> None:
    body = {prompt: SAID if prompt == "messages" else "hello there", "max_tokens": 5, "ignore_eos": True}
    found = events(gateway, path, **body, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert len({event["usage"]["prompt_tokens"] for event in found}) == 1
    for options in ({"include_usage": False, "continuous_usage_stats": True}, {"include_usage": True}):
        assert "usage" not in events(gateway, path, **body, stream_options=options)[0]


def test_token_ids_of_prompt_and_answer(gateway: Gateway) -> None:
    chat = {"messages": SAID, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = gateway.post("/v1/chat/completions", **chat)
    assert whole["prompt_token_ids"] == gateway.post("/tokenize", messages=SAID)["tokens"]
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"] == 6
    found = events(gateway, "/v1/chat/completions", **chat)
    assert [event["prompt_token_ids"] for event in found if "prompt_token_ids" in event] == [whole["prompt_token_ids"]]
    assert [i for event in found for choice in event["choices"] for i in choice.get("token_ids", ())] == ids
    words = {"prompt": "hello there", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    text = gateway.post("/v1/completions", **words, return_token_ids=True)["choices"][0]
    assert text["prompt_token_ids"] == gateway.post("/tokenize", prompt="hello there")["tokens"]
    assert len(text["token_ids"]) == 4
    first = events(gateway, "/v1/completions", **words, return_token_ids=True)[0]["choices"][0]
    assert first["prompt_token_ids"] == text["prompt_token_ids"]
    assert "token_ids" not in gateway.post("/v1/completions", **words)["choices"][0]


def test_log_probabilities_name_tokens_by_id(gateway: Gateway) -> None:
    body = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_tokens_as_token_ids": True}
    named = gateway.post("/v1/completions", prompt="hello", logprobs=2, return_token_ids=True, **body)["choices"][0]
    assert named["logprobs"]["tokens"] == [f"token_id:{i}" for i in named["token_ids"]]
    assert all(key.startswith("token_id:") for top in named["logprobs"]["top_logprobs"] for key in top)
    chat = gateway.post("/v1/chat/completions", messages=SAID, logprobs=True, top_logprobs=1, **body)["choices"][0]
    assert all(
        token["token"].startswith("token_id:") and token["top_logprobs"][0]["token"].startswith("token_id:")
        for token in chat["logprobs"]["content"]
    )


def test_bytes_of_parts_of_characters(gateway: Gateway) -> None:
    """They were null, although clients join them to the answer's text, as OpenAI's documentation advises."""
    text = "🦊 über 猫"
    body = {"messages": SAID, "logprobs": True, "top_logprobs": 2, "structured_outputs": {"choice": [text]}}
    choice = gateway.post("/v1/chat/completions", **body)["choices"][0]
    assert choice["message"]["content"] == text
    tokens = choice["logprobs"]["content"]
    assert any("\ufffd" in token["token"] for token in tokens), "the vocabulary has no token for some character"
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode().startswith(text)
    assert all(top["bytes"] is not None for token in tokens for top in token["top_logprobs"])


def with_offsets(gateway: Gateway, streamed: bool, **body: Any) -> tuple[str, list[str], list[int]]:
    """Return the text of a completion with its tokens and their offsets."""
    body |= {"prompt": "a 🦊 and über 猫, then text", "echo": True, "logprobs": 0, "max_tokens": 3}
    if streamed:
        choices = [event["choices"][0] for event in events(gateway, "/v1/completions", **body) if event["choices"]]
    else:
        choices = gateway.post("/v1/completions", **body)["choices"]
    text = "".join(choice["text"] for choice in choices)
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens, offsets = ([one for part in logprobs for one in part[name]] for name in ("tokens", "text_offset"))
    return text, tokens, offsets


@pytest.mark.parametrize("streamed", [False, True])
def test_offsets_of_tokens_in_the_text(gateway: Gateway, streamed: bool) -> None:
    """A character of several tokens counted several times."""
    text, tokens, offsets = with_offsets(gateway, streamed, temperature=0)
    assert offsets == sorted(offsets)
    whole = [(token, at) for token, at in zip(tokens, offsets, strict=True) if "\ufffd" not in token]
    assert len(whole) < len(tokens), "some token is a part of a character"
    assert all(text[at:].startswith(token) for token, at in whole)


@pytest.mark.parametrize("streamed", [False, True])
def test_offsets_of_sampled_tokens(gateway: Gateway, streamed: bool) -> None:
    """Among these answers are hidden special tokens and bytes inside characters."""
    hidden = 0
    for seed in (4, 182, 202, 374):
        text, tokens, offsets = with_offsets(gateway, streamed, ignore_eos=True, seed=seed)
        assert offsets == sorted(offsets)
        for token, offset, after in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
            if token.startswith("<|"):
                hidden += 1
                assert offset == after
            elif "\ufffd" not in token:
                assert text[offset:].startswith(token)
    assert hidden


def test_the_sampled_token_is_among_its_alternatives(gateway: Gateway) -> None:
    found = gateway.post("/v1/completions", prompt="hello", max_tokens=3, logprobs=0, ignore_eos=True)
    logprobs = found["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [
        {token: logprob} for token, logprob in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    ]


def test_the_last_text_of_a_stream_ends_it(gateway: Gateway) -> None:
    """As with vLLM: no event without a text follows an answer that was cut off, and the first has no token yet."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    options: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "logprobs": 1, "stream_options": usage}
    *texts, _ = events(gateway, "/v1/completions", prompt="hello", **options)
    counts = [len(event["choices"][0]["logprobs"]["tokens"]) for event in texts]  # tokens may arrive together
    assert all(counts)
    assert sum(counts) == 3
    assert [event["choices"][0]["finish_reason"] for event in texts] == [None] * (len(texts) - 1) + ["length"]
    first, *others, _ = events(gateway, "/v1/chat/completions", messages=SAID, **options | {"logprobs": True})
    assert (first["choices"][0]["delta"]["content"], first["usage"]["completion_tokens"]) == ("", 0)
    assert others[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": None}, {}])
def test_options_of_streams_are_for_streams(gateway: Gateway, options: dict[str, Any]) -> None:
    for path, prompt in (("chat/completions", {"messages": SAID}), ("completions", {"prompt": "a"})):
        body = {**prompt, "max_tokens": 1, "stream_options": options}
        answer = httpx.post(f"{gateway.url}/v1/{path}", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
        assert httpx.post(f"{gateway.url}/v1/{path}", json=body | {"stream": True}, timeout=60).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_continued_message_is_returned_with_its_continuation(gateway: Gateway, streamed: bool) -> None:
    told = [*SAID, {"role": "assistant", "content": "Once upon"}]
    body: dict[str, Any] = {"messages": told, "continue_final_message": True, "add_generation_prompt": False}
    body |= {"max_tokens": 4, "temperature": 0, "ignore_eos": True}

    def text(**options: Any) -> str:
        if not streamed:
            return str(gateway.post("/v1/chat/completions", **body, **options)["choices"][0]["message"]["content"])
        found = events(gateway, "/v1/chat/completions", **body, **options)
        return "".join(event["choices"][0]["delta"].get("content", "") for event in found)

    assert text(echo=True) == "Once upon" + text()


def test_prompt_logprobs_are_null_and_the_fingerprint_is_stable(gateway: Gateway) -> None:
    chats = [gateway.post("/v1/chat/completions", messages=SAID, max_tokens=2) for _ in range(2)]
    words = gateway.post("/v1/completions", prompt="hello", max_tokens=2)
    assert chats[0]["prompt_logprobs"] is None
    assert words["choices"][0]["prompt_logprobs"] is None
    prints = {found["system_fingerprint"] for found in (*chats, words)}
    prints |= {event["system_fingerprint"] for event in events(gateway, "/v1/completions", prompt="a", max_tokens=2)}
    assert len(prints) == 1
    assert prints.pop().startswith("fp_")


def test_tokenize_as_vllm(gateway: Gateway) -> None:
    plain = gateway.post("/tokenize", messages=SAID)
    special = gateway.post("/tokenize", messages=SAID, add_special_tokens=True, return_token_strs=True)
    assert plain["token_strs"] is None
    assert special["tokens"][-plain["count"] :] == plain["tokens"]
    assert len(special["token_strs"]) == special["count"] >= plain["count"]
    chat = {"messages": SAID, "max_tokens": 1, "add_special_tokens": True}
    assert gateway.post("/v1/chat/completions", **chat)["usage"]["prompt_tokens"] == special["count"]
    info = httpx.get(f"{gateway.url}/tokenizer_info").json()
    assert info["tokenizer_class"].endswith("Tokenizer")
    assert "<|assistant|>" in info["chat_template"]
    assert not any(key.endswith(("_path", "_file")) for key in info)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called_and_the_prompt_stays(gateway: Gateway, mode: str) -> None:
    def choice(name: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    body = {"messages": SAID, "tools": TOOLS, "max_tokens": 60, "temperature": 0}
    found = gateway.post("/v1/chat/completions", **body, tool_choice=choice("get_time"))
    calls = found["choices"][0]["message"].get("tool_calls", [])
    assert all(call["function"]["name"] == "get_time" for call in calls)
    assert calls or mode == "auto"
    assert found["usage"]["prompt_tokens"] == gateway.post("/v1/chat/completions", **body)["usage"]["prompt_tokens"]
    with pytest.raises(openai.BadRequestError, match="'rain' is allowed and is not among") as caught:
        gateway.client.post("/chat/completions", body={**body, "tool_choice": choice("rain")}, cast_to=object)
    assert caught.value.param == "tool_choice"


def test_functions_are_answered_in_their_own_format(gateway: Gateway) -> None:
    ask: Any = gateway.client.chat.completions.create
    body: dict[str, Any] = {
        "model": "demo",
        "functions": [WEATHER],
        "function_call": {"name": "get_weather"},
        "seed": 1,
    }
    choice = ask(messages=SAID, **body).choices[0]
    assert choice.finish_reason == "function_call"
    assert json.loads(choice.message.function_call.arguments)["city"] in ("Oslo", "Rome")
    pieces = [chunk.choices[0] for chunk in ask(messages=SAID, **body, stream=True)]
    deltas = [piece.delta.function_call for piece in pieces if piece.delta.function_call]
    assert deltas[0].name == "get_weather"
    assert "".join(delta.arguments for delta in deltas) == choice.message.function_call.arguments
    assert pieces[-1].finish_reason == "function_call"
    result = {"role": "function", "name": "get_weather", "content": "dry"}
    after = ask(messages=[*SAID, choice.message, result], model="demo", functions=[WEATHER], max_tokens=4)
    assert after.usage.prompt_tokens > 0


def test_json_object_with_a_schema(gateway: Gateway) -> None:
    form = {"type": "json_object", "schema": WEATHER["parameters"]}
    found = gateway.post("/v1/chat/completions", messages=SAID, response_format=form, max_tokens=120)
    assert json.loads(found["choices"][0]["message"]["content"])["city"] in ("Oslo", "Rome")


def test_written_tokens_are_those_that_were_computed(gateway: Gateway) -> None:
    body = {"prompt": "seven grey mice went out to see the sea " * 12, "max_tokens": 1, "cache_salt": "written"}
    first = gateway.post("/v1/completions", **body)["usage"]
    assert first["prompt_tokens_details"]["cache_write_tokens"] == first["prompt_tokens"]
    again = gateway.post("/v1/completions", **body)["usage"]
    details = again["prompt_tokens_details"]
    assert details["cache_write_tokens"] == again["prompt_tokens"] - details["cached_tokens"]
    skipped = gateway.post("/v1/completions", **body, skip_cache=True)["usage"]
    assert skipped["prompt_tokens_details"]["cache_write_tokens"] == 0


@pytest.mark.parametrize(
    ("options", "retention", "seconds"),
    [
        ({"ttl": "30m"}, None, 1800), ({"ttl": "12h"}, "24h", 43200), (None, "24h", 86400), (None, "in_memory", None),
        ({"ttl": "999999d"}, None, 2592000), ({"ttl": "soon"}, None, None), ([1], {}, None), ({}, "0m", None),
    ],
)  # fmt: skip
def test_lifetimes(options: Any, retention: Any, seconds: int | None) -> None:
    assert retention_seconds(options, retention) == seconds


@pytest.fixture
def idle() -> WorkerRouter:
    """Three workers that are up, as a router sees them."""
    router = WorkerRouter([])
    router.workers = [Worker(f"w{i}", None, None, alive=True) for i in range(3)]  # type: ignore[arg-type]
    return router


def test_requests_with_a_key_prefer_one_worker_unless_a_prefix_decides(idle: WorkerRouter) -> None:
    def pick(text: str, key: str, salt: bytes = b"") -> str:
        cache = pb.CacheOptions(prompt_cache_key=key, tenant_salt=salt)
        request = pb.GenerateRequest(prompt=pb.Prompt(text=text), cache=cache)
        worker = idle.pick(request, set())
        worker.in_flight += 1
        return worker.target

    first = pick("a", "thread")
    assert [pick("b", "thread"), pick("c" * 600, "thread")] == [first, first]
    other = pick("d" * 600, "")
    assert other != first
    assert pick("d" * 600, "thread") == other
    assert pick("e", "thread", b"guest") not in (first, other)


def test_a_fleet_breaks_ties_by_key() -> None:
    def hashed(text: str, **more: Any) -> bytes:
        return prompt_prefix_hashes({"messages": [{"role": "user", "content": text}], **more}).session_key

    assert hashed("a", prompt_cache_key="k") == hashed("b", prompt_cache_key="k") != hashed("a")
    assert hashed("a", prompt_cache_key="k") != hashed("a", prompt_cache_key="k", cache_salt="guest")
    assert hashed("a", prompt_cache_key=["k"]) == hashed("a")
