"""/v1/messages with Anthropic's own client: text, calls, streams, counts, prefills, errors, aliases."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from benchmarks.node import Node
from inference_svc.gateway.anthropic_api import content_blocks
from inference_svc.gateway.anthropic_api.content_blocks import system_text
from inference_svc.gateway.anthropic_api.error_envelope import MESSAGES_PATH
from inference_svc.gateway.anthropic_api.messages_request import CountTokensRequest
from tests.inference_svc.gateway.conftest import Gateway, of_node
from tests.inference_svc.gateway.messages_client import (
    GREEDY,
    HELLO,
    LONG,
    TEXT,
    TOOL,
    client_of,
    events,
    only_block,
    prompt_tokens,
    raw_events,
    said,
)


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with client_of(gateway) as found:
        yield found


@pytest.fixture(scope="module")
def named(two: Node) -> Iterator[Gateway]:
    """A gateway with aliases."""
    found = of_node(two, "--alias", "small=demo,gone=nothing", "--claude-names")
    yield found
    found.close()


def test_text_whole_and_streamed_agree(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "system": "Be kind.", "messages": HELLO, "max_tokens": 60, **GREEDY, **TEXT}
    whole: Any = client.messages.create(**asked)
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", "demo", "end_turn")
    block = only_block(whole)
    assert set(json.loads(block.text)) <= {"hello", "there"}
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == only_block(final).text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)


def test_events_come_in_order_with_usage_from_the_start(gateway: Gateway) -> None:
    marked = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    body = {"model": "demo", "max_tokens": 60, "messages": [{"role": "user", "content": marked}], **TEXT}
    httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60).raise_for_status()
    found = raw_events(gateway, body)
    kinds = [kind for kind, _ in found]
    assert all(kind == data["type"] for kind, data in found)
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    start, end = found[0][1]["message"]["usage"], found[-2][1]["usage"]
    assert start["cache_read_input_tokens"] > 50
    assert start["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0,
        "ephemeral_1h_input_tokens": start["cache_creation_input_tokens"],
    }
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert [start[name] for name in names] == [end[name] for name in names]
    assert 0 < start["output_tokens"] < end["output_tokens"]
    prompt = {name: body[name] for name in ("model", "messages")}
    counted = httpx.post(f"{gateway.url}/v1/messages/count_tokens", json=prompt).json()["input_tokens"]
    assert sum(start[name] for name in names) == counted


def test_a_prompt_without_breakpoints_is_input(client: anthropic.Anthropic) -> None:
    usage = client.messages.create(model="demo", max_tokens=1, messages=HELLO).usage
    assert usage.cache_creation_input_tokens == 0
    assert (
        usage.input_tokens + (usage.cache_read_input_tokens or 0)
        == client.messages.count_tokens(model="demo", messages=HELLO).input_tokens
    )


def test_reasons_to_stop(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "messages": HELLO, **GREEDY, **TEXT}
    cut = client.messages.create(max_tokens=2, **asked)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 2)
    stopped = client.messages.create(max_tokens=60, stop_sequences=['"'], **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", '"')
    one, two = (client.messages.count_tokens(model="demo", messages=said(LONG * n)).input_tokens for n in (1, 2))
    long = said(LONG * ((4096 - one) // (two - one)))
    full = client.messages.create(model="demo", max_tokens=8000, messages=long, extra_body={"top_k": 1})
    assert full.stop_reason in ("model_context_window_exceeded", "end_turn")
    assert full.stop_reason == "end_turn" or prompt_tokens(full.usage) + full.usage.output_tokens == 4096


def test_an_open_answer_goes_on(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens
    begun: Any = [*HELLO, {"role": "assistant", "content": "Good"}]
    closed: Any = [*begun, {"role": "user", "content": ""}]
    assert counted(model="demo", messages=begun).input_tokens < counted(model="demo", messages=closed).input_tokens - 2


# ---- prompts ----------------------------------------------------------------------------------------------------


def test_system_messages_stay_where_they_are() -> None:
    body: Any = {
        "model": "demo",
        "system": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "system", "content": [{"type": "text", "text": "between"}]},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        ],
    }
    chat = CountTokensRequest.model_validate(body).prompt().chat
    assert [(m.role, m.content) for m in chat.messages] == [
        ("system", "first\n\nsecond"),
        ("user", "a"),
        ("system", "between"),
        ("user", "b\n\nc"),
    ]


def test_results_and_reasoning_of_earlier_turns() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"z": 1, "a": [2]}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    body: Any = {
        "model": "demo",
        "thinking": {"type": "disabled"},
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me look."},
                    use,
                ],
            },
            {
                "role": "user",
                "content": [
                    {**result, "content": [{"type": "text", "text": "dry"}, {"type": "text", "text": "warm"}]},
                    {**result, "content": "no such city", "is_error": True},
                    result,
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
    }
    chat = CountTokensRequest.model_validate(body).prompt().chat
    assert [(m.role, m.content, m.tool_call_id) for m in chat.messages] == [
        ("assistant", "Let me look.", ""),
        ("tool", "dry\n\nwarm", "toolu_1"),
        ("tool", "Error: no such city", "toolu_1"),
        ("tool", "", "toolu_1"),
        ("user", "and now?", ""),
    ]
    (call,) = chat.messages[0].tool_calls
    assert (call.id, call.name, call.arguments) == ("toolu_1", "get_weather", '{"z": 1, "a": [2]}')
    assert json.loads(chat.template_arguments) == {"enable_thinking": False}


HEADER = "x-anthropic-billing-header: cc_version=2.1.159.a1b; cc_entrypoint=cli; cch=0f3e9;"


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        (HEADER, ""),
        (f"{HEADER}\nYou help.", "You help."),
        (f"{HEADER} You help; x=1;", "You help; x=1;"),
        ([HEADER, "You help."], "You help."),
        ([f"{HEADER}\n\n", HEADER], HEADER),
        (["You help.", HEADER], f"You help.\n\n{HEADER}"),
        ("x-anthropic-billing-headers are a topic.", "x-anthropic-billing-headers are a topic."),
        ([], ""),
    ],
)
def test_the_header_that_changes_with_every_request_is_removed(system: Any, kept: str) -> None:
    blocks = [content_blocks.TextBlock(type="text", text=text) for text in system]
    assert system_text(system if isinstance(system, str) else blocks) == kept


# ---- tools ------------------------------------------------------------------------------------------------------


def test_max_tokens_0_prefills(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "messages": said("Prewarmed. " + LONG), "cache_control": {"type": "ephemeral"}}
    cold = client.messages.create(max_tokens=0, tools=[TOOL], tool_choice={"type": "any"}, **asked)
    assert (cold.content, cold.stop_reason, cold.usage.output_tokens) == ([], "max_tokens", 0)
    assert (cold.usage.cache_creation_input_tokens or 0) > 100
    tools = [TOOL]
    start, end, _ = events(client, max_tokens=0, **asked, tools=tools)
    assert (start.type, end.type, end.usage.output_tokens) == ("message_start", "message_delta", 0)
    warm = client.messages.create(max_tokens=1, tools=tools, **asked).usage
    assert warm.cache_creation_input_tokens < 0.2 * cold.usage.cache_creation_input_tokens


# ---- refusals ---------------------------------------------------------------------------------------------------

IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0 is of the type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}
                ]
            },
            "messages.0.content.0.content.0 is of the type 'image'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages.0.content.0 is a tool_use in a message of the role user",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role is 'tool'"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"stop_sequences": ["x"] * 9}, "stop_sequences"),
        ({"temperature": 9}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [{"name": "x"}]}, "tools.0"),
        ({"mcp_servers": [{"type": "url", "name": "x", "url": "x"}]}, "mcp_servers is not supported"),
        ({"max_token": 1}, "max_token is not an option of this server (did you mean max_tokens?)"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "JSON schema"),
    ],
)
def test_errors_are_anthropics_and_name_the_field(gateway: Gateway, option: dict[str, Any], named: str) -> None:
    body = {"model": "demo", "max_tokens": 1, "messages": HELLO} | option
    answer = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert named in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"]


def test_codes_have_the_classes_of_the_client(locked: Gateway, client: anthropic.Anthropic) -> None:
    asked: Any = {"max_tokens": 1, "messages": HELLO}
    with pytest.raises(anthropic.NotFoundError, match="'other' is not served here") as caught:
        client.messages.create(model="other", **asked)
    assert caught.value.type == "not_found_error"
    assert (caught.value.request_id or "").startswith("req_")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="demo", max_tokens=1, messages=said("hello " * 9000))
    with pytest.raises(anthropic.APIStatusError, match="larger than") as large:
        client.messages.create(model="demo", max_tokens=1, messages=said("x" * (9 << 20)))
    assert (large.value.status_code, large.value.type) == (413, "request_too_large")
    with pytest.raises(anthropic.AuthenticationError) as unknown, client_of(locked) as other:
        other.messages.create(model="demo", **asked)
    assert unknown.value.type == "authentication_error"
    for path, code in ((f"{MESSAGES_PATH}/batches", 404), (MESSAGES_PATH, 405)):
        answer = httpx.get(str(client.base_url).rstrip("/") + path)
        assert (answer.status_code, answer.json()["type"]) == (code, "error")


def test_both_kinds_of_keys_are_taken(locked: Gateway) -> None:
    for key in ({"api_key": "guest"}, {"auth_token": "guest"}):
        with client_of(locked, **key) as client:
            assert client.messages.create(model="demo", max_tokens=1, messages=HELLO).id.startswith("msg_")


def test_a_worker_that_dies_ends_a_stream_with_an_error() -> None:
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB") as node:
        gateway = of_node(node, "--worker-wait-seconds", "0")
        try:
            asked: Any = {"model": "demo", "max_tokens": 3000, "messages": HELLO}
            schema = {"type": "array", "items": {"enum": ["hello"]}, "minItems": 600}
            form: Any = {"format": {"type": "json_schema", "schema": schema}}
            with (
                client_of(gateway) as client,
                client.messages.create(stream=True, output_config=form, **asked) as stream,
            ):
                assert next(iter(stream)).type == "message_start"
                node.kill("worker-0")
                with pytest.raises(anthropic.APIStatusError) as caught:
                    list(stream)
            assert caught.value.type == "overloaded_error"
            with client_of(gateway) as client, pytest.raises(anthropic.APIStatusError) as down:
                client.messages.create(**asked)
            assert (down.value.status_code, down.value.type) == (503, "overloaded_error")
        finally:
            gateway.close()


# ---- names ------------------------------------------------------------------------------------------------------


def test_aliases_answer_under_the_requested_name(named: Gateway) -> None:
    with client_of(named) as client:
        for name in ("small", "claude-of-2030", "demo"):
            assert client.messages.create(model=name, max_tokens=1, messages=HELLO).model == name
            assert client.messages.count_tokens(model=name, messages=HELLO).input_tokens > 3
        with pytest.raises(anthropic.NotFoundError, match="'nothing' is not served"):
            client.messages.create(model="gone", max_tokens=1, messages=HELLO)
    chat: Any = [{"role": "user", "content": "hi"}]
    assert named.client.chat.completions.create(model="small", messages=chat, max_tokens=1).model == "small"
    assert named.client.responses.create(model="small", input="hi", max_output_tokens=1).model == "small"
    assert [model.id for model in named.client.models.list()] == ["demo", "small", "claude-*"]
    assert named.client.models.retrieve("claude-x").id == "claude-x"


def test_anthropics_clients_list_models_in_their_format(named: Gateway) -> None:
    with client_of(named) as client:
        listed = client.models.list()
        assert [(model.type, model.id, model.display_name) for model in listed] == [
            ("model", name, name) for name in ("demo", "small", "claude-*")
        ]
        started = client.models.retrieve("claude-x").created_at
        assert abs(started - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(hours=1)
        assert [model.id for model in client.models.list(limit=1)] == ["demo", "small", "claude-*"], "it pages"
        last = client.models.list(before_id="claude-*", limit=1)
        assert (last.data[0].id, last.has_more) == ("small", True)
        with pytest.raises(anthropic.NotFoundError, match="'nothing' is not served") as unknown:
            client.models.retrieve("nothing")
        assert unknown.value.type == "not_found_error"
        for asked, said in (({"limit": 0}, "limit is '0'; allowed are 1 to 1000"), ({"after_id": "x"}, "no model of")):
            with pytest.raises(anthropic.BadRequestError, match=said):
                client.models.list(**asked)  # type: ignore[arg-type]


# ---- the client's own types -------------------------------------------------------------------------------------
