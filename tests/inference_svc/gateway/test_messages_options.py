"""Options of /v1/messages: every parameter and field of Anthropic's client is honoured, ignored or refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import anthropic
import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.anthropic_api import content_blocks
from inference_svc.gateway.anthropic_api.messages_request import CountTokensRequest, FunctionTool, MessagesRequest
from inference_svc.gateway.prompt_fingerprint import FingerprintStore, PromptFingerprint
from inference_svc.gateway.unsupported_options import IGNORED_OF_MESSAGES, NEUTRAL_OF_MESSAGES
from tests.inference_svc.gateway.conftest import Gateway
from tests.inference_svc.gateway.http_server import listening
from tests.inference_svc.gateway.messages_client import HELLO, client_of


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with client_of(gateway) as found:
        yield found


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (MessagesRequest, beta_params.MessageCreateParamsStreaming),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_parameter_of_the_client_is_known(kind: Any, params: Any) -> None:
    """It is honoured, without effect, or refused by name."""
    known = {*kind.model_fields, *IGNORED_OF_MESSAGES, *NEUTRAL_OF_MESSAGES}
    assert set(get_type_hints(params)) - known == set()
    assert set(kind.model_fields).isdisjoint({*IGNORED_OF_MESSAGES, *NEUTRAL_OF_MESSAGES})


@pytest.mark.parametrize(
    ("block", "of_client"),
    [
        (content_blocks.TextBlock, "TextBlockParam"),
        (content_blocks.ThinkingBlock, "ThinkingBlockParam"),
        (content_blocks.RedactedThinkingBlock, "RedactedThinkingBlockParam"),
        (content_blocks.ToolUseBlock, "ToolUseBlockParam"),
        (content_blocks.ToolResultBlock, "ToolResultBlockParam"),
        (content_blocks.ToolReferenceBlock, "ToolReferenceBlockParam"),
        (FunctionTool, "ToolParam"),
    ],
)
def test_every_field_of_the_clients_blocks_is_known(block: Any, of_client: str) -> None:
    hints = get_type_hints(getattr(anthropic.types, of_client))
    assert set(hints) - set(block.model_fields) == set()


def test_options_for_the_service_around_the_model_are_taken(client: anthropic.Anthropic) -> None:
    answer = client.beta.messages.create(
        model="demo",
        max_tokens=1,
        messages=HELLO,
        betas=["context-management-2025-06-27", "a-name-of-2030"],
        metadata={"user_id": "someone"},
        service_tier="auto",
        container="container_1",
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        output_config={"effort": "high"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"mcp_servers": None, "diagnostics": {"previous_message_id": None}, "speed": "fast"},
    )
    assert answer.type == "message"
    ignored: Any = {name: {"any": "value"} for name in IGNORED_OF_MESSAGES}
    assert client.messages.create(model="demo", max_tokens=1, messages=HELLO, extra_body=ignored).id
    assert client.messages.count_tokens(model="demo", messages=HELLO, extra_body=ignored).input_tokens


@pytest.mark.parametrize(
    "system", ["x" * 1000, [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]]
)
def test_a_message_is_converted_beside_the_event_loop(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``chat`` runs in a thread; what the event loop reads afterwards converts nothing again."""
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    request = MessagesRequest(
        model="demo", max_tokens=1, system=system, messages=[{"role": "user", "content": [marked]}]
    )
    request.chat()
    monkeypatch.setattr(content_blocks.InputMessage, "chat_messages", None)
    assert request.retain_seconds == 3600


async def test_a_message_is_fingerprinted_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint, threads = FingerprintStore.fingerprint, list[threading.Thread]()

    def recorded(store: FingerprintStore, request: pb.GenerateRequest) -> PromptFingerprint:
        threads.append(threading.current_thread())
        return fingerprint(store, request)

    monkeypatch.setattr(FingerprintStore, "fingerprint", recorded)
    message = {"role": "user", "content": "x" * 100_000}
    body = {"model": "", "max_tokens": 1, "messages": [message], "diagnostics": {"previous_message_id": None}}
    async with listening() as (port, _), httpx.AsyncClient(timeout=60) as caller:
        await caller.post(f"http://127.0.0.1:{port}/v1/messages", json=body)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_a_breakpoint_may_be_in_a_tool_that_is_skipped() -> None:
    """It ends where the tools before it end, which is the first message."""
    function = {"name": "f", "input_schema": {"type": "object"}}
    search = {"type": "web_search_20250305", "name": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    for tools, retained in (([function, search], [(1, 3600)]), ([search], [])):
        request = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": HELLO, "tools": tools})
        assert [(point.messages, point.retain_seconds) for point in request.chat().cache_breakpoints] == retained
