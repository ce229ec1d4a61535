"""Coding agents' sessions in both protocols: each turn computes its own new tokens and hardly more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from benchmarks.node import Node
from tests.inference_svc.gateway.agent_session import NUM_TOOLS, TURNS, AgentSession
from tests.inference_svc.gateway.codex_session import CodexSession
from tests.inference_svc.gateway.conftest import Gateway, of_node

MAX_EXTRA_TOKENS = 32


class _Turn:
    """A streamed answer: its content, and the token counts of its prompt."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        answer = httpx.post(f"{url}/v1/messages?beta=true", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        started, ended = events[0]["message"]["usage"], events[-2]["usage"]
        self.computed = started["input_tokens"] + started["cache_creation_input_tokens"]
        self.prompt, self.output = self.computed + started["cache_read_input_tokens"], ended["output_tokens"]
        assert started["cache_creation"]["ephemeral_1h_input_tokens"] == self.computed, "marked with a TTL of 1 h"
        self.content: list[dict[str, Any]] = []
        arguments: list[str] = []
        for event in events:
            if event["type"] == "content_block_start":
                self.content.append(event["content_block"])
                arguments = []
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
                arguments.append(event["delta"]["partial_json"])
            elif event["type"] == "content_block_stop" and self.content[-1]["type"] == "tool_use":
                self.content[-1]["input"] = json.loads("".join(arguments))


class _Response:
    """A streamed response: its items, and the token counts of its prompt."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        last = json.loads([line[6:] for line in answer.text.splitlines() if line.startswith("data: ")][-1])
        assert last["type"] in ("response.completed", "response.incomplete")
        usage = last["response"]["usage"]
        self.prompt, self.output = usage["input_tokens"], usage["output_tokens"]
        self.computed = self.prompt - usage["input_tokens_details"]["cached_tokens"]
        self.content: list[dict[str, Any]] = last["response"]["output"]


@dataclass(frozen=True)
class _Protocol:
    """One API under test: its session, recorded answers, request options, and the function for a live turn."""

    session: type[AgentSession | CodexSession]
    answer: type[_Turn | _Response]
    short: dict[str, Any]
    forced: dict[str, Any]
    live_turns: int


MESSAGES = _Protocol(
    AgentSession, _Turn, {"max_tokens": 1},
    {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 400}, 4,
)  # fmt: skip
RESPONSES = _Protocol(
    CodexSession, _Response, {"max_output_tokens": 1},
    {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 400}, 3,
)  # fmt: skip
each_protocol = pytest.mark.parametrize("protocol", [MESSAGES, RESPONSES], ids=["messages", "responses"])


@each_protocol
@pytest.mark.parametrize("killed", [False, True])
def test_a_recorded_session_computes_what_is_new(protocol: _Protocol, killed: bool) -> None:
    """Also after SIGKILL of all processes in the middle of it: everything stored is there again."""
    session = protocol.session("demo")
    assert len(session.tools) == NUM_TOOLS
    answers = [session.recorded_answer(turn) for turn in range(TURNS)]
    with Node("demo", arena_bytes="256MiB", pool_bytes="128MiB") as node:
        gateway, before = of_node(node), 0
        try:
            for turn in range(TURNS):
                if killed and turn == TURNS // 2:
                    gateway = _start_again(node, gateway)
                found = protocol.answer(gateway.url, session.request(turn, answers) | protocol.short)
                if turn:
                    assert found.computed <= found.prompt - before + MAX_EXTRA_TOKENS, turn
                before = found.prompt
        finally:
            gateway.close()
    assert before > 2500


@each_protocol
def test_a_live_session_computes_no_call_again(protocol: _Protocol) -> None:
    """The model's own calls are sent back: they are among the tokens that the cache has."""
    session = protocol.session("demo")
    answers: list[list[dict[str, Any]]] = []
    with Node("demo", arena_bytes="256MiB", pool_bytes="128MiB") as node:
        gateway, before = of_node(node), 0
        try:
            for turn in range(protocol.live_turns):
                found = protocol.answer(gateway.url, session.request(turn, answers) | protocol.forced)
                if turn:
                    assert found.computed <= found.prompt - before + MAX_EXTRA_TOKENS, turn
                answers.append(found.content)
                before = found.prompt + found.output
        finally:
            gateway.close()


def _start_again(node: Node, gateway: Gateway) -> Gateway:
    node.settle()
    gateway.process.kill()
    gateway.process.wait()
    gateway.client.close()
    node.kill("worker-0")
    node.kill("daemon")
    node.start_daemon()
    node.start_worker(0)
    return of_node(node)
