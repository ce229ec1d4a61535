"""How long answers are whose requests do not say, and what clients of OpenAI look for in errors and lists."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from kvsidecar.cli.service_settings import read_settings
from kvsidecar.errors import (
    ConfigurationError,
    KVSidecarError,
    Overloaded,
    PromptExceedsPool,
    Unauthenticated,
    Unavailable,
)
from kvsidecar.requests import REST_OF_CONTEXT

from benchmarks.node import Node
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest
from inference_svc.gateway.openai_writer import error_response
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from tests.inference_svc.gateway.conftest import Gateway, of_node

MESSAGES = [{"role": "user", "content": "say it again"}]
LEFT = 420  # tokens of room behind the prompt, more than the 256 that were the default once


@pytest.fixture(scope="module")
def short(two: Node) -> Iterator[Gateway]:
    """A gateway whose chats are short unless they say."""
    found = of_node(two, "--default-max-tokens", "20")
    yield found
    found.close()


def nearly_full(gateway: Gateway) -> tuple[list[dict[str, str]], int]:
    """A conversation that leaves about LEFT tokens of the context, and how many exactly."""
    words = 100
    while True:
        said = [{"role": "user", "content": "a " * words}]
        found = gateway.post("/tokenize", messages=said)
        left = found["max_model_len"] - found["count"]
        if left <= LEFT:
            assert left > 300
            return said, left
        words += max(1, (left - LEFT) // 2)


def test_a_chat_may_have_what_the_context_still_holds(gateway: Gateway) -> None:
    said, left = nearly_full(gateway)
    for options in ({}, {"truncate_prompt_tokens": -1, "speculation": "ngram"}):
        found = gateway.post("/v1/chat/completions", messages=said, ignore_eos=True, **options)
        assert found["usage"]["completion_tokens"] == left, options
        assert found["choices"][0]["finish_reason"] == "length"


def test_several_such_chats_are_answered_together(gateway: Gateway) -> None:
    said, left = nearly_full(gateway)
    body = {"messages": said, "ignore_eos": True, "n": 3, "stream": True, "temperature": 1.0, "seed": 3}
    begun, ended = set[int](), set[int]()
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                begun.add(choice["index"])
                if choice["finish_reason"]:
                    assert len(begun) == 3, "one waited for another's end"
                    ended.add(choice["index"])
    assert len(ended) == 3
    assert left > 256


def test_a_response_may_have_it_too(gateway: Gateway) -> None:
    schema = {"type": "array", "items": {"const": 7}, "minItems": 100, "maxItems": 100}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    options: dict[str, Any] = {"input": "sevens", "text": wanted, "temperature": 0}
    found = gateway.post("/v1/responses", **options)
    assert found["usage"]["output_tokens"] > 256
    assert found["status"] == "completed"
    assert json.loads(found["output"][0]["content"][0]["text"]) == [7] * 100
    assert found["max_output_tokens"] is None
    cut = gateway.post("/v1/responses", **options, max_output_tokens=5)
    assert (cut["usage"]["output_tokens"], cut["incomplete_details"]) == (5, {"reason": "max_output_tokens"})


def test_a_completion_has_256(gateway: Gateway, short: Gateway) -> None:
    for one in (gateway, short):
        found = one.post("/v1/completions", prompt="once", ignore_eos=True)
        assert found["usage"]["completion_tokens"] == 256


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 20),
        ({"max_tokens": 30}, 30),
        ({"max_completion_tokens": 25, "max_tokens": 30}, 25),
        ({"min_tokens": 24}, 24),
    ],
)
def test_an_operator_may_set_the_default(short: Gateway, options: dict[str, int], tokens: int) -> None:
    found = short.post("/v1/chat/completions", messages=MESSAGES, ignore_eos=True, **options)
    assert found["usage"]["completion_tokens"] == tokens


def test_an_operators_default_holds_for_responses(short: Gateway) -> None:
    schema = {"type": "array", "items": {"const": 7}, "minItems": 600}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    found = short.post("/v1/responses", input="sevens", text=wanted)
    assert (found["usage"]["output_tokens"], found["status"]) == (20, "incomplete")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"default_max_tokens": -1}, "default_max_tokens.*-1.*greater than or equal to 0"),
        ({"default_max_tokens": 5, "nodes": "http://a:1"}, "default_max_tokens.*for the gateway of one node"),
    ],
)
def test_a_default_that_cannot_be_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_settings(GatewayConfig, given, None)


def test_what_is_asked_of_a_worker_when_nothing_is_said() -> None:
    chat = ChatRequest.model_validate({"messages": MESSAGES})
    assert chat.to_grpc(chat.prompts()[0], "x").max_tokens == REST_OF_CONTEXT
    response = ResponsesRequest.model_validate({"input": "x"}).chat([], MESSAGES)
    assert response.to_grpc(response.prompts()[0], "x").max_tokens == REST_OF_CONTEXT
    completion = CompletionRequest.model_validate({"prompt": "x"})
    assert not completion.to_grpc(completion.prompts()[0], "x").HasField("max_tokens")


def test_the_document_says_the_defaults(gateway: Gateway) -> None:
    schemas = httpx.get(f"{gateway.url}/openapi.json").json()["components"]["schemas"]

    def told(body: str, name: str) -> str:
        return str(schemas[body]["properties"][name]["description"])

    for body, name in (
        ("ChatRequest", "max_tokens"),
        ("ChatRequest", "max_completion_tokens"),
        ("ResponsesRequest", "max_output_tokens"),
    ):
        assert "what the context still holds" in told(body, name)
        assert "--default-max-tokens" in told(body, name)
    assert "256" in told("CompletionRequest", "max_tokens")


# ---- what clients look for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_openais_code_and_its_numbers(gateway: Gateway, stream: bool) -> None:
    said = [{"role": "user", "content": "a " * 9000}]
    with pytest.raises(openai.BadRequestError) as chat:
        gateway.client.chat.completions.create(model="demo", messages=said, stream=stream)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError) as completion:
        gateway.client.completions.create(model="demo", prompt=[7] * 5000, stream=stream)
    for caught in (chat, completion):
        assert caught.value.code == "context_length_exceeded"
        assert "the prompt is too long: " in caught.value.message
    assert "it has 5000 tokens, and the maximum context length is 4096" in completion.value.message


def test_an_unknown_model_has_openais_code(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError) as asked:
        gateway.client.chat.completions.create(model="gpt-9", messages=MESSAGES)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError) as looked:
        gateway.client.models.retrieve("gpt-9")
    assert {asked.value.code, looked.value.code} == {"model_not_found"}
    assert asked.value.param == "model"


def test_errors_with_a_name_at_openai_have_it(gateway: Gateway, locked: Gateway) -> None:
    wrong = httpx.get(f"{gateway.url}/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    nowhere = httpx.get(f"{gateway.url}/v1/nowhere")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
    assert httpx.get(f"{locked.url}/v1/models").json()["error"]["code"] == "invalid_api_key"
    option = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x", "best_of": 2}).json()["error"]
    assert (option["code"], option["param"]) == ("unsupported_parameter", "best_of")
    value = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x", "n": 0}).json()["error"]
    assert value["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (Overloaded("x"), "rate_limit_exceeded", 429),
        (PromptExceedsPool("x"), "context_length_exceeded", 413),
        (Unauthenticated("x"), "invalid_api_key", 401),
        (Unavailable("x"), "unavailable", 503),
    ],
)
def test_codes_of_errors(error: KVSidecarError, code: str, status: int) -> None:
    answer = error_response(error)
    assert (json.loads(bytes(answer.body))["error"]["code"], answer.status_code) == (code, status)


def test_a_model_was_created_when_its_gateway_began(two: Node) -> None:
    before = int(time.time())
    gateway = of_node(two)
    try:
        (listed,) = gateway.client.models.list().data
        assert before <= listed.created <= time.time()
        assert gateway.client.models.retrieve("demo").created == listed.created
    finally:
        gateway.close()


USUAL = [
    ("v1/chat/completions", {"messages": MESSAGES, "reasoning_effort": "medium", "verbosity": "medium"}),
    ("v1/chat/completions", {"messages": MESSAGES, "prompt_cache_key": "k", "store": True, "service_tier": "auto"}),
    ("v1/responses", {"input": "x", "reasoning": {"effort": "medium"}, "text": {"verbosity": "medium"}}),
    ("v1/responses", {"input": "x", "reasoning": {"effort": None, "summary": None}, "prompt_cache_key": "k"}),
    ("v1/responses", {"input": "x", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}),
]


@pytest.mark.parametrize(("path", "body"), USUAL)
def test_what_asks_for_nothing_passes(short: Gateway, path: str, body: dict[str, Any]) -> None:
    short.post(f"/{path}", **body)
