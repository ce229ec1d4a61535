"""Breakpoints of prompts in tokens, with a real tokenizer and chat template."""

from __future__ import annotations

import pytest
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.retained_prefixes import WHOLE_PROMPT

from inference_svc.models.loader import load
from inference_svc.request.breakpoint_finder import BreakpointFinder
from inference_svc.request.request_builder import RequestBuilder

CHAT = pb.Prompt(
    chat=pb.Chat(
        messages=[pb.ChatMessage(role=("user", "assistant")[i % 2], content=f"message {i} " * 20) for i in range(20)]
    )
)


@pytest.fixture(scope="module")
def builder() -> RequestBuilder:
    return RequestBuilder(load("demo"), 4096)


def messages(*points: tuple[int, int]) -> pb.CacheOptions:
    return pb.CacheOptions(breakpoints=[pb.CacheBreakpoint(messages=n, retain_seconds=s) for n, s in points])


def length(builder: RequestBuilder, count: int) -> int:
    """Tokens of the first messages."""
    return len(builder.tokenizer.tokens(pb.Prompt(chat=pb.Chat(messages=CHAT.chat.messages[:count])), False)[0])


def test_a_message_ends_where_the_conversation_up_to_it_ends(builder: RequestBuilder) -> None:
    whole = length(builder, 20)
    found = builder.breakpoints.find(CHAT, messages((5, 3600), (12, 60)), whole)
    assert found == ((length(builder, 5), 3600), (length(builder, 12), 60))
    assert builder.breakpoints.find(CHAT, messages((20, 9)), whole) == ((whole, 9),)
    assert builder.breakpoints.find(CHAT, messages((4000, 9), (3, 5)), whole) == ((whole, 9),)


def test_the_whole_prompt_includes_its_answer(builder: RequestBuilder) -> None:
    options = pb.CacheOptions(retain_seconds=30)
    assert builder.breakpoints.retained(CHAT, options, 500) == ((WHOLE_PROMPT, 30),)
    options.breakpoints.add(tokens=64, retain_seconds=99)
    options.breakpoints.add(tokens=10**6, retain_seconds=20)
    assert builder.breakpoints.retained(CHAT, options, 500) == ((64, 99), (WHOLE_PROMPT, 30))


def test_many_breakpoints_cost_four_renderings_and_no_promise(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = BreakpointFinder._end_of_messages

    def counted(self: BreakpointFinder, chat: pb.Chat, count: int) -> int:
        calls.append(count)
        return real(self, chat, count)

    monkeypatch.setattr(BreakpointFinder, "_end_of_messages", counted)
    wanted = [(n, 1000 - n) for n in range(1, 17)]
    found = builder.breakpoints.find(CHAT, messages(*wanted), length(builder, 20))
    assert calls == [13, 14, 15, 16]
    assert found[0] == (length(builder, 13), 999), "a retention is a minimum: of several, the longest time"


def test_a_breakpoint_without_an_end_is_refused(builder: RequestBuilder) -> None:
    text = pb.Prompt(text="some text")
    for options, prompt, named in (
        (messages((1, 9)), text, "this one has messages 1"),
        (messages((0, 9)), CHAT, "this one has messages 0"),
        (pb.CacheOptions(breakpoints=[pb.CacheBreakpoint(retain_seconds=9)]), CHAT, "this one has neither"),
        (pb.CacheOptions(breakpoints=[pb.CacheBreakpoint(tokens=3)]), CHAT, "retain_seconds of a breakpoint is 0"),
        (messages(*[(1, 9)] * 17), CHAT, "17 items; at most 16"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            builder.breakpoints.find(prompt, options, 10)
