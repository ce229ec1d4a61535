"""Requests of Anthropic's client and their answers, for the tests of /v1/messages."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx

from tests.inference_svc.gateway.conftest import Gateway

TOOL: Any = {
    "name": "get_weather",
    "description": "Tells it.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NOTHING: Any = {
    "name": "now",
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}
HELLO: Any = [{"role": "user", "content": "hello there"}]
WORDS = {"type": "array", "items": {"enum": ["hello", "there"]}, "minItems": 2, "maxItems": 3}
TEXT: Any = {"output_config": {"format": {"type": "json_schema", "schema": WORDS}}}
"""Options that make the model answer with JSON, because the small model alone gives very short answers."""
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""Options for greedy answers. Anthropic's client no longer has a parameter for the temperature."""
LONG = "The quick brown fox jumps over the lazy dog. " * 12


def client_of(gateway: Gateway, **key: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, max_retries=0, **(key or {"api_key": "k"}))


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


def only_block(message: Any) -> Any:
    (block,) = message.content
    return block


def prompt_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def events(client: anthropic.Anthropic, **asked: Any) -> list[Any]:
    with client.messages.create(stream=True, **asked) as stream:
        return list(stream)


def raw_events(gateway: Gateway, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return all events of a stream, including the events that Anthropic's client drops."""
    answer = httpx.post(f"{gateway.url}/v1/messages?beta=true", json=body | {"stream": True}, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
