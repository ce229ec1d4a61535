"""/v1/responses with the official client: text, calls, streams, and conversations that go on."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from kvsidecar.errors import InvalidRequest

from inference_svc.gateway.responses.memory import Memory
from tests.inference_svc.gateway.conftest import Gateway

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells it.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    by_the_sea: bool


def test_text_whole_and_streamed_agree(gateway: Gateway) -> None:
    """The model has little to say by itself."""
    words = {"type": "array", "items": {"enum": ["hello", "there"]}, "minItems": 2, "maxItems": 3}
    form = {"format": {"type": "json_schema", "name": "words", "schema": words}}
    options: Any = {"model": "demo", "input": "hello there", "text": form, "max_output_tokens": 60, "temperature": 0}
    whole = gateway.client.responses.create(instructions="Be kind.", **options)
    assert set(json.loads(whole.output_text)) <= {"hello", "there"}
    assert whole.usage is not None
    assert whole.status == "completed"
    with gateway.client.responses.stream(instructions="Be kind.", **options) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == f"response.{whole.status}"
    events = list(gateway.client.responses.create(instructions="Be kind.", stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    final = events[-1].response  # type: ignore[union-attr]
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_conversation_goes_on_from_a_response(gateway: Gateway) -> None:
    ask = gateway.client.responses.create
    first = ask(model="demo", input="my name is Ada", max_output_tokens=6)
    second = ask(model="demo", input="hello", previous_response_id=first.id, max_output_tokens=6)
    told = [{"role": "user", "content": "my name is Ada"}, *first.output, {"role": "user", "content": "hello"}]
    by_hand = ask(model="demo", input=told, max_output_tokens=6, store=False)  # type: ignore[arg-type]
    assert second.usage.input_tokens == by_hand.usage.input_tokens  # type: ignore[union-attr]
    assert gateway.client.responses.retrieve(first.id).output_text == first.output_text
    gateway.client.responses.delete(first.id)
    for gone in (first.id, by_hand.id):
        with pytest.raises(openai.BadRequestError, match="is not kept") as caught:
            ask(model="demo", input="x", previous_response_id=gone)
        assert caught.value.param == "previous_response_id"
        for asked in (gateway.client.responses.retrieve, gateway.client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="is not kept"):
                asked(gone)


@pytest.mark.parametrize("streamed", [False, True])
def test_functions_are_called_and_their_results_read(gateway: Gateway, streamed: bool) -> None:
    options: Any = {"model": "demo", "tools": [TOOL], "temperature": 0}
    named = {"type": "function", "name": "get_weather"}
    demanded: Any = {"tool_choice": named, "input": "weather?", "max_output_tokens": 90}
    if streamed:
        events = list(gateway.client.responses.create(stream=True, **demanded, **options))
        response = events[-1].response  # type: ignore[union-attr]
        pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert len(pieces) > 1
        assert "".join(pieces) == response.output[0].arguments
    else:
        response = gateway.client.responses.create(**demanded, **options)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    options |= {"tool_choice": "none", "max_output_tokens": 2}
    told = gateway.client.responses.create(input=[result], previous_response_id=response.id, **options)
    by_hand = gateway.client.responses.create(input=[{"role": "user", "content": "weather?"}, call, result], **options)
    assert told.usage.input_tokens == by_hand.usage.input_tokens


def test_the_sdk_parses_into_its_types(gateway: Gateway) -> None:
    answer = gateway.client.responses.parse(model="demo", input="x", text_format=City, max_output_tokens=90)
    assert isinstance(answer.output_parsed, City)


@pytest.mark.parametrize(
    ("option", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ],
)
def test_what_is_not_here_is_refused_by_name(gateway: Gateway, option: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.responses.create(**{"model": "demo", "input": "x", **option})
    assert str(caught.value.param).startswith(param)


def test_memory_is_bounded_by_number_and_by_bytes() -> None:
    memory = Memory(most=3, most_bytes=10_000)
    for i in range(5):
        memory.keep({"id": f"r{i}"}, [{"role": "user", "content": "x"}])
    with pytest.raises(InvalidRequest, match="'r1' is not kept"):
        memory.messages("r1")
    assert memory.messages("r2") == [{"role": "user", "content": "x"}]
    memory.keep({"id": "large"}, [{"role": "user", "content": "x" * 9_990}])
    assert memory._bytes <= 10_000
    memory.keep({"id": "after"}, [])
    memory.drop("after")
    assert memory._bytes == 0
    assert memory.messages(None) == []
