"""Sends prompts to a server with a fixed concurrency, and records token times.

``POST /chat/completions`` or ``/completions``, streamed, with ``stream_options.include_usage``:
https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvsidecar.bench.shared_prefix_prompts import Prompt
from kvsidecar.cli.gateway_target import failure_text
from kvsidecar.errors import InvalidRequest, KVSidecarError, Unavailable
from kvsidecar.net.line_splitter import lines_of

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class BenchServer:
    """The server under test.

    ``url`` ends in ``/v1``; an empty ``model`` selects the first listed model. Without ``tls``, the client trusts the
    public authorities.
    """

    url: str
    model: str = ""
    key: str = ""
    chat: bool = True
    timeout_seconds: float = 600.0
    tls: ssl.SSLContext | None = None

    def client(self, connections: int) -> httpx.AsyncClient:
        """Create a client. Raises InvalidRequest if the URL is none."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        timeout = httpx.Timeout(self.timeout_seconds, connect=_CONNECT_SECONDS)
        try:
            return httpx.AsyncClient(
                base_url=self.url, headers=headers, limits=limits, timeout=timeout, verify=self.tls or True
            )
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{self.url!r} is no URL: {error}") from error


@dataclass
class RequestResult:
    """Result of one prompt. Times are in seconds since the prompt was sent; ``why`` is the error."""

    first: bool
    first_token: float = 0.0
    between: list[float] = field(default_factory=list)
    whole: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """None if the server does not report it."""
    generated_tokens: int = 0
    why: str = ""


async def model_of(server: BenchServer) -> str:
    """Return the first model that a server lists. Raises Unavailable, KVSidecarError."""
    try:
        async with server.client(1) as client:
            answer = await client.get("models")
            if answer.status_code != 200:
                raise KVSidecarError(f"{server.url}/models says {_reason(answer.status_code, answer.content)}")
            listed = [str(model["id"]) for model in answer.json()["data"] or ()]
    except httpx.HTTPError as error:
        raise Unavailable(f"no answer from {server.url}: {failure_text(error)}; is it running?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise KVSidecarError(f"{server.url}/models is no list of models; does the URL end in /v1?") from error
    if not listed:
        raise Unavailable(f"{server.url} serves no model yet; try again in a moment")
    return listed[0]


async def send_prompts(
    server: BenchServer,
    given: Iterable[Prompt],
    *,
    concurrency: int,
    max_tokens: int,
    ignore_eos: bool,
    on_result: Callable[[RequestResult], None] = lambda _: None,
) -> list[RequestResult]:
    """Send all prompts in order, with at most ``concurrency`` requests at a time.

    Calls ``on_result`` with each result when the answer has ended.
    """
    todo, answers = iter(given), list[RequestResult]()
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True

    async def ask_on(client: httpx.AsyncClient) -> None:
        for prompt in todo:
            answer = RequestResult(prompt.first)
            try:
                await _ask(client, server.chat, body, prompt.text, answer)
            except (httpx.HTTPError, KVSidecarError, ValueError) as error:
                answer.why = str(error) or type(error).__name__
            answers.append(answer)
            on_result(answer)

    async with server.client(concurrency) as client, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(ask_on(client))
    return answers


async def _ask(client: httpx.AsyncClient, chat: bool, body: dict[str, Any], text: str, answer: RequestResult) -> None:
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    began = last = time.perf_counter()
    path = "chat/completions" if chat else "completions"
    async with client.stream("POST", path, json={**body, **asked}) as response:
        if response.status_code != 200:
            raise KVSidecarError(_reason(response.status_code, await response.aread()))
        ended = False
        async for line in lines_of(response.aiter_bytes()):
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                ended = True
                break
            if not _says_something(data, answer):
                continue
            now = time.perf_counter()
            if answer.first_token:
                answer.between.append(now - last)
            else:
                answer.first_token = now - began
            last = now
    answer.whole = time.perf_counter() - began
    if not ended:
        raise KVSidecarError("the answer broke off")
    # An empty answer has no text event, so its end counts as its first token.
    answer.first_token = answer.first_token or answer.whole


def _says_something(data: str, answer: RequestResult) -> bool:
    """Return whether an event has text of any kind; a chat's first event has only a role. Adds its usage to ``answer``.

    Raises KVSidecarError for an error event, and for an event of another form.
    """
    try:
        event = json.loads(data)
        if event.get("error"):
            raise KVSidecarError(_error_text(event["error"]))
        if event.get("usage"):
            _count(event["usage"], answer)
        return any(_has_text(choice) for choice in event.get("choices") or ())
    except (ValueError, TypeError, AttributeError) as error:
        raise KVSidecarError(f"the server sent {data[:80]!r}, which is no event of an answer") from error


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    texts = (choice.get("text"), *map(delta.get, ("content", "reasoning_content", "reasoning", "tool_calls")))
    return any(texts)


def _count(usage: dict[str, Any], answer: RequestResult) -> None:
    answer.prompt_tokens = usage.get("prompt_tokens") or 0
    answer.generated_tokens = usage.get("completion_tokens") or 0
    details = usage.get("prompt_tokens_details") or {}
    answer.cached_tokens = details.get("cached_tokens")


def _reason(code: int, content: bytes) -> str:
    try:
        found = json.loads(content)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = _error_text(error)
    except ValueError:
        text = content.decode("utf-8", "replace")
    return f"{code}: {text[:300]}"


def _error_text(error: object) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
