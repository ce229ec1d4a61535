"""Answers that must be something: OpenAI's response_format, vLLM's structured_outputs and guided options."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import openai
import pydantic
import pytest
from kvsidecar.errors import InvalidRequest

from benchmarks.node import Node
from inference_svc.gateway.openai_requests import ChatRequest
from inference_svc.gateway.unsupported_options import parse
from tests.inference_svc.gateway.conftest import Gateway

MESSAGES: list[Any] = [{"role": "user", "content": "how is the weather"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "dry": {"type": "boolean"},
    },
    "required": ["city", "days", "dry"],
    "additionalProperties": False,
}


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    dry: bool
    degrees: int = pydantic.Field(ge=-50, le=60)


def ask(gateway: Gateway, **options: Any) -> str:
    answer = gateway.client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=200, **options)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    return str(choice.message.content)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_json_schema_is_kept_to(gateway: Gateway, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    found = json.loads(ask(gateway, response_format=wanted, temperature=temperature))
    assert set(found) == {"city", "days", "dry"}
    assert found["city"] in ("Oslo", "Rome")
    assert isinstance(found["dry"], bool)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # the SDK's, of its own message
def test_the_sdk_parses_into_its_types(gateway: Gateway) -> None:
    answer = gateway.client.chat.completions.parse(
        model="demo", messages=MESSAGES, max_tokens=100, response_format=Weather
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)
    again = gateway.client.chat.completions.create(
        model="demo", messages=[*MESSAGES, answer.choices[0].message, *MESSAGES], max_tokens=2
    )
    assert again.usage is not None


@pytest.mark.parametrize("streamed", [False, True])
def test_any_object_is_json(gateway: Gateway, streamed: bool) -> None:
    """The model may have much to say: cut off, it is the beginning of an object."""
    wanted: Any = {"type": "json_object"}
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 40, "temperature": 0, "response_format": wanted}
    if streamed:
        parts = gateway.client.chat.completions.create(stream=True, **options)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    else:
        answer = gateway.client.chat.completions.create(**options).choices[0]
        text = answer.message.content
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
    assert text.startswith("{")


@pytest.mark.parametrize("streamed", [False, True])
def test_an_object_that_is_not_cut_off_is_whole(gateway: Gateway, two: Node, streamed: bool) -> None:
    """The model prefers to close braces, also where none is open."""
    (brace,) = two.client(0).tokenize("}")[-1:]
    options: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    options |= {"response_format": {"type": "json_object"}, "logit_bias": {str(brace): 100}}
    if streamed:
        parts = [part.choices[0] for part in gateway.client.chat.completions.create(stream=True, **options)]
        text, reason = "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason
    else:
        choice = gateway.client.chat.completions.create(**options).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert reason == "stop"
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_choice": ["yes", "no", "per\"haps é"]}, "yes|no|per\"haps é"),
        ({"guided_regex": "[a-c]{3,5}[0-9]"}, "[a-c]{3,5}[0-9]"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_json": '{"enum": [12]}'}, "12"),
        ({"guided_grammar": 'root ::= "a" [0-9] "z"'}, "a[0-9]z"),
        ({"guided_grammar": 'start: "b" /[0-9]/'}, "b[0-9]"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"regex": "x{2}"}}, "xx"),
        (
            {"structured_outputs": {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2},
                                    "disable_any_whitespace": True}},
            r"\[[12],[12]\]",
        ),
        ({"structured_outputs": {"json_object": None, "grammar": 'root ::= "g"'}}, "g"),
    ],
)  # fmt: skip
def test_what_users_of_vllm_send_is_kept_to(gateway: Gateway, extra: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, ask(gateway, temperature=1.2, extra_body=extra))


def test_completions_have_it_too_and_prompts_differ_from_answers(gateway: Gateway) -> None:
    answer = gateway.client.completions.create(
        model="demo", prompt=["one", "two"], n=2, max_tokens=9, extra_body={"guided_regex": "[01]{8}"}
    )
    assert len(answer.choices) == 4
    assert all(re.fullmatch("[01]{1,8}", choice.text) for choice in answer.choices)


def test_log_probabilities_are_among_what_the_grammar_allows(gateway: Gateway) -> None:
    answer = gateway.client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=5,
        extra_body={"guided_regex": "[ab]"},
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    first = (logprobs.content or [])[0]
    assert {t.token for t in first.top_logprobs} == {"a", "b"}
    assert sum(math.exp(t.logprob) for t in first.top_logprobs) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("option", "param", "said"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
         "response_format", "Invalid type: strin"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format", "the JSON schema keyword 'not' is not supported; leave it out"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
          "type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}}}},
         "response_format", "the JSON schema keyword 'uniqueItems' is not supported; leave it out"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex", "unclosed group"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json", "not JSON"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice", "at least one"),
        ({"extra_body": {"guided_grammar": "root ::= missing"}}, "guided_grammar", "missing"),
        ({"extra_body": {"guided_choice": ["a"], "guided_regex": "b"}}, "guided_choice", "one of them"),
        ({"extra_body": {"guided_regex": "a" * 70_000}}, "guided_regex", "at most 65536 are allowed"),
        ({"extra_body": {"guided_json": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5,
          "maximum": 3}}, "required": ["a"]}}}, "guided_json", "property 'a' is unsatisfiable"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_says_why(
    gateway: Gateway, option: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.chat.completions.create(model="demo", messages=MESSAGES, stream=stream, **option)
    assert said in caught.value.message
    assert caught.value.param == param
    assert "\n" not in caught.value.body["message"]


def test_grpc_has_it_too(two: Node) -> None:
    client = two.client(0)
    found = client.generate("hello", json_schema=SCHEMA, max_tokens=200)
    assert set(json.loads(found.text)) == {"city", "days", "dry"}
    assert client.generate("hello", choice=["yes", "no"], max_tokens=9).text in ("yes", "no")
    with pytest.raises(InvalidRequest, match="unclosed group") as caught:
        client.generate("hello", regex="(a")
    assert caught.value.param == "grammar"
    with pytest.raises(InvalidRequest, match="keyword 'uniqueItems' is not supported"):
        client.generate("hello", json_schema={"type": "array", "uniqueItems": True})


def test_a_schema_in_another_script_has_its_own_size() -> None:
    """In escapes, this schema has more than the 64 KiB of a grammar."""
    schema = {"description": "г" * 30_000, "type": "string"}
    body = {"messages": MESSAGES, "response_format": {"type": "json_object", "schema": schema},
            "tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}]}  # fmt: skip
    request = parse(ChatRequest, json.dumps(body).encode(), body)
    _, grammar = request.grammar
    assert grammar is not None
    assert json.loads(grammar.json_schema) == schema
    (tool,) = request.prompts()[0].chat.tools
    assert tool.parameters == grammar.json_schema
