"""/v1/responses with the official client: text, calls, streams, and conversations that go on."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import openai
import pydantic
import pytest
from kvsidecar.errors import InvalidRequest, UnknownResponse

from inference_svc.gateway.responses_api.conversation_store import ConversationStore, StoredResponse
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


def stored(name: str, text: str = "x") -> StoredResponse:
    return StoredResponse.of({"id": name}, [{"role": "user", "content": text}])


def test_memory_is_bounded_by_number_and_by_bytes() -> None:
    memory = ConversationStore(max_responses=3, max_bytes=10_000)
    for i in range(5):
        memory.keep("a", stored(f"r{i}"))
    with pytest.raises(InvalidRequest, match="'r1' is not kept"):
        memory.messages("a", "r1")
    assert memory.messages("a", "r2") == [{"role": "user", "content": "x"}]
    memory.keep("a", stored("large", "x" * 9_990))
    assert memory.num_bytes <= 10_000
    memory.keep("a", stored("after"))
    memory.drop("a", "after")
    assert memory.num_bytes == 0
    assert memory.messages("a", None) == []


def test_a_tenants_responses_evict_its_own_and_are_its_own_alone() -> None:
    memory = ConversationStore(max_bytes=10_000)
    memory.keep("a", stored("first", "my secret is 4711"))
    for i in range(20):
        memory.keep("b", stored(f"b{i}", "y" * 5_000))
    assert memory.messages("a", "first") == [{"role": "user", "content": "my secret is 4711"}]
    assert memory.num_bytes <= 20_000
    for asked in (memory.response, memory.drop):
        with pytest.raises(UnknownResponse, match="'first' is not kept"):
            asked("b", "first")
    with pytest.raises(InvalidRequest, match="'first' is not kept"):
        memory.messages("b", "first")
    assert json.loads(memory.response("a", "first")) == {"id": "first"}


def test_beyond_the_limit_of_all_the_largest_tenant_loses() -> None:
    memory = ConversationStore(max_bytes=10_000, max_bytes_in_all=16_000)
    memory.keep("small", stored("s"))
    for name in ("b", "c"):
        for i in range(4):
            memory.keep(name, stored(f"{name}{i}", "y" * 1_500))
    assert memory.num_bytes <= 16_000
    assert memory.messages("small", "s")


def test_what_is_kept_weighs_in_memory_what_it_is_counted_as() -> None:
    """As objects of Python these would be many times their JSON."""
    memory, numbers = ConversationStore(), list(range(300))
    tracemalloc.start()
    try:
        for i in range(100):
            memory.keep("a", StoredResponse.of({"id": f"r{i}", "metadata": {"a": [{"b": n} for n in numbers]}}, []))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory.num_bytes >= 100 * 2_000
    assert held <= 1.1 * memory.num_bytes
