"""/v1/responses with the official client: text, calls, streams and continued conversations."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import openai
import pydantic
import pytest
from kvsidecar.errors import InvalidRequest, UnknownResponse
from openai.types import responses
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from benchmarks.node import Node
from inference_svc.gateway.responses_api.conversation_store import ConversationStore, StoredResponse
from inference_svc.gateway.responses_api.input_items import (
    CallItem,
    CustomCallItem,
    MessageItem,
    ReasoningItem,
    ResultItem,
)
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
        ({"tools": [{"type": "file_search"}]}, "tools.0.type"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"extra_body": {"background": "perhaps"}}, "background"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
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
    for asked in (memory.find, memory.drop):
        with pytest.raises(UnknownResponse, match="'first' is not kept"):
            asked("b", "first")
    with pytest.raises(InvalidRequest, match="'first' is not kept"):
        memory.messages("b", "first")
    assert json.loads(memory.find("a", "first").response) == {"id": "first"}


def test_beyond_the_limit_of_all_the_largest_tenant_loses() -> None:
    memory = ConversationStore(max_bytes=10_000, max_bytes_in_all=16_000)
    memory.keep("small", stored("s"))
    for name in ("b", "c"):
        for i in range(4):
            memory.keep(name, stored(f"{name}{i}", "y" * 1_500))
    assert memory.num_bytes <= 16_000
    assert memory.messages("small", "s")


def test_what_is_kept_weighs_in_memory_what_it_is_counted_as() -> None:
    """As Python objects, the stored responses would take many times the memory of their JSON."""
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


# ---- as Codex sends them, items, conversations ------------------------------------------------------------------


CODEX: Any = {
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "xhigh", "summary": "detailed"},
    "text": {"verbosity": "low"},
    "prompt_cache_key": "thread",
    "max_output_tokens": 6,
    "extra_body": {"client_metadata": {"x": "y"}},
    "tools": [
        TOOL,
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "s: X"},
        },
        {"type": "namespace", "name": "mcp", "description": "d", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search", "external_web_access": True},
    ],
}


def test_a_request_of_codex_is_answered_with_its_functions_alone(gateway: Gateway, two: Node) -> None:
    reasoning = {
        "type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}],
        "content": [{"type": "reasoning_text", "text": "think"}], "encrypted_content": "abc",
    }  # fmt: skip
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}", "namespace": None}
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "dry"}]}
    patch = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin Patch"}
    patched = {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and now?"}]}
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "q": "x"}}
    said: Any = [question, reasoning, call, result, patch, patched, searched, question]
    ask = gateway.client.responses.create
    found = list(ask(model="demo", input=said, instructions="Be brief.", stream=True, **CODEX))
    assert found[-1].type in ("response.completed", "response.incomplete")
    count = gateway.client.responses.input_tokens.count
    prompt = {"model": "demo", "instructions": "Be brief."}
    whole = count(input=said, tools=CODEX["tools"], **prompt).input_tokens  # type: ignore[arg-type]
    assert found[-1].response.usage.input_tokens == whole
    plain = [question, call, result, patch, patched, question]
    assert count(input=plain, tools=[TOOL], **prompt).input_tokens == whole  # type: ignore[arg-type]
    assert two.wait_for_log('"skipped_tools": "custom,namespace,web_search"')
    with pytest.raises(openai.BadRequestError, match="file_search"):
        ask(model="demo", input="x", tools=[TOOL, {"type": "file_search", "vector_store_ids": ["v"]}])
    with pytest.raises(openai.NotFoundError):
        gateway.client.responses.retrieve(found[-1].response.id)


def test_every_parameter_of_the_sdk_at_a_neutral_value(gateway: Gateway) -> None:
    neutral: dict[str, Any] = {
        "access_programs": {"cyber": "standard"}, "background": False, "context_management": [], "conversation": None,
        "image": {"context_compression": "auto"}, "include": [], "instructions": None, "max_output_tokens": 4,
        "max_tool_calls": 3, "metadata": {}, "moderation": None, "parallel_tool_calls": True,
        "previous_response_id": None, "prompt": None,
        "prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "in_memory", "reasoning": {"effort": "none"}, "safety_identifier": "s",
        "service_tier": "auto", "store": True, "stream": False, "stream_options": None, "temperature": 1,
        "text": {"format": {"type": "text"}, "verbosity": "high"}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": 1, "truncation": "auto", "user": "u",
    }  # fmt: skip
    assert set(neutral) == set(ResponseCreateParamsNonStreaming.__annotations__) - {"model", "input"}
    found = gateway.client.post("/responses", body={"model": "demo", "input": "x", **neutral}, cast_to=Response)
    assert (found.truncation, found.max_tool_calls, found.prompt_cache_key) == ("auto", 3, "k")
    assert found.usage is not None
    details = found.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == found.usage.input_tokens
    assert found.to_dict()["text"] == neutral["text"], "the verbosity was not returned"
    plain = gateway.client.responses.create(model="demo", input="x", max_output_tokens=1)
    assert plain.to_dict()["text"] == {"format": {"type": "text"}, "verbosity": "medium"}, "OpenAI's default"


def test_sampling_is_as_in_chats(gateway: Gateway) -> None:
    options = {"top_k": 1, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 3}
    asked: Any = {"model": "demo", "input": "hello there", "max_output_tokens": 12}
    body = {**options, "stop": ["zzz"], "chat_template_kwargs": {"enable_thinking": False}}
    found = gateway.client.responses.create(**asked, extra_body=body)
    on = gateway.client.responses.create(**asked, extra_body=options | {"ignore_eos": True})
    assert on.usage is not None
    assert on.usage.output_tokens == 12
    said: Any = [{"role": "user", "content": "hello there"}]
    chat = gateway.client.chat.completions.create(model="demo", messages=said, max_tokens=12, extra_body=options)
    assert found.output_text == (chat.choices[0].message.content or "")


def test_log_probabilities_of_a_response(gateway: Gateway) -> None:
    options: Any = {"model": "demo", "input": "how is the weather", "max_output_tokens": 8, "temperature": 0}
    whole = gateway.client.responses.create(include=["message.output_text.logprobs"], top_logprobs=2, **options)
    for part in [part for item in whole.output for part in item.content]:  # type: ignore[union-attr]
        assert "".join(token.token for token in part.logprobs) == part.text  # type: ignore[union-attr]
        assert all(len(token.top_logprobs) == 2 for token in part.logprobs)  # type: ignore[union-attr]
    plain = gateway.client.responses.create(**options)
    assert plain.output_text == whole.output_text != ""
    assert all(part.logprobs == [] for item in plain.output for part in item.content)  # type: ignore[union-attr]


def test_a_prompt_that_is_too_long_is_truncated_on_request(gateway: Gateway) -> None:
    long = "so much to say again " * 3000
    with pytest.raises(openai.BadRequestError, match="the prompt is too long"):
        gateway.client.responses.create(model="demo", input=long, max_output_tokens=4)
    found = gateway.client.responses.create(model="demo", input=long, max_output_tokens=4, truncation="auto")
    assert found.usage is not None
    assert found.usage.output_tokens > 0


def test_items_of_a_kept_response_are_listed_and_referred_to(gateway: Gateway, locked: Gateway) -> None:
    client = gateway.client.responses
    said: Any = [{"role": "user", "content": f"fact {i}: the sea is wide"} for i in range(3)]
    first = client.create(model="demo", input=said, max_output_tokens=4)
    listed = client.input_items.list(first.id, order="asc", limit=2)
    assert [item.content[0].text for item in listed.data] == [item["content"] for item in said[:2]]  # type: ignore[union-attr]
    assert len(list(client.input_items.list(first.id, limit=2))) == 3
    references: Any = [
        {"type": "item_reference", "id": item.id} for item in client.input_items.list(first.id, order="asc")
    ]
    counts = [gateway.client.responses.input_tokens.count(model="demo", input=one) for one in (references, said)]
    assert counts[0].input_tokens == counts[1].input_tokens
    with pytest.raises(openai.BadRequestError, match="'msg_none', which is not kept") as caught:
        client.create(model="demo", input=[{"type": "item_reference", "id": "msg_none"}])
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="not made with background"):
        client.cancel(first.id)
    with pytest.raises(openai.NotFoundError):
        client.cancel("resp_none")
    for query in ("limit=0", "limit=x", "order=up", "after=z"):
        with pytest.raises(openai.BadRequestError):
            gateway.client.get(f"/responses/{first.id}/input_items?{query}", cast_to=object)


def test_a_conversation_grows_by_its_responses(gateway: Gateway) -> None:
    client = gateway.client.conversations
    made = client.create(items=[{"type": "message", "role": "user", "content": "I am Ada"}], metadata={"a": "b"})
    count: Any = gateway.client.responses.input_tokens.count
    before = count(model="demo", input="who am I?", conversation=made.id).input_tokens
    assert before > count(model="demo", input="who am I?").input_tokens
    answer = gateway.client.responses.create(
        model="demo", input="who am I?", conversation=made.id, max_output_tokens=6, store=False
    )
    assert answer.conversation is not None
    assert answer.conversation.id == made.id
    items = list(client.items.list(made.id, order="asc"))
    assert [item.role for item in items[:2]] == ["user", "user"]  # type: ignore[union-attr]
    assert [item.id for item in items[2:]] == [item.id for item in answer.output]
    assert count(model="demo", input="again", conversation=made.id).input_tokens > before
    more = client.items.create(made.id, items=[{"type": "message", "role": "user", "content": "bye"}])
    assert client.items.retrieve(more.data[0].id, conversation_id=made.id).content[0].text == "bye"  # type: ignore[union-attr]
    client.items.delete(more.data[0].id, conversation_id=made.id)
    assert len(list(client.items.list(made.id))) == len(items)
    assert client.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.retrieve(made.id).metadata == {"c": "d"}
    with pytest.raises(openai.BadRequestError, match="both set"):
        gateway.client.post(
            "/responses", body={"input": "x", "conversation": made.id, "previous_response_id": "resp_x"}, cast_to=object
        )
    assert client.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="Conversation with id"):
        client.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="Conversation with id"):
        gateway.client.responses.create(model="demo", input="x", conversation=made.id)


def test_a_conversation_has_a_largest_size(gateway: Gateway) -> None:
    client = gateway.client.conversations
    large: Any = [{"type": "message", "role": "user", "content": "y" * (1 << 20)}]
    with pytest.raises(openai.BadRequestError, match="start another one"):
        client.create(items=large)
    made = client.create(items=[{"type": "reasoning", "summary": [], "encrypted_content": "y" * ((1 << 20) - 200)}])  # type: ignore[typeddict-item,list-item]
    small: Any = [{"type": "message", "role": "user", "content": "y" * 300}]
    for added in (large, small):
        with pytest.raises(openai.BadRequestError, match="start another one") as caught:
            client.items.create(made.id, items=added)
        assert caught.value.param == "items"
    gateway.client.responses.create(model="demo", input="y" * 300, conversation=made.id, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="start another one") as caught:
        gateway.client.responses.create(model="demo", input="x", conversation=made.id)
    assert caught.value.param == "conversation"
    client.delete(made.id)


def test_items_of_another_tenant_are_unknown() -> None:
    store = ConversationStore()
    store.keep("a", StoredResponse.of({"id": "resp_1", "output": [{"id": "msg_1"}]}, [], [{"id": "msg_0"}]))
    found = store.items("a", ["msg_0", "msg_1", "msg_0"])
    assert [found[name]["id"] for name in ("msg_0", "msg_1")] == ["msg_0", "msg_1"]
    with pytest.raises(InvalidRequest, match="not kept"):
        store.items("b", ["msg_1"])
    with pytest.raises(UnknownResponse):
        store.find("b", "resp_1")


@pytest.mark.parametrize(
    ("of_sdk", "ours"),
    [
        (responses.ResponseFunctionToolCallItem, CallItem),
        (responses.ResponseFunctionToolCallOutputItem, ResultItem),
        (responses.ResponseCustomToolCallItem, CustomCallItem),
        (responses.ResponseCustomToolCallOutputItem, ResultItem),
        (responses.ResponseOutputMessage, MessageItem),
        (responses.ResponseReasoningItem, ReasoningItem),
    ],
)
def test_items_have_every_field_that_the_sdk_sends_back(of_sdk: type[pydantic.BaseModel], ours: Any) -> None:
    def names(kind: type[pydantic.BaseModel]) -> set[str]:
        return {field.alias or name for name, field in kind.model_fields.items()}

    assert names(of_sdk) <= names(ours)
