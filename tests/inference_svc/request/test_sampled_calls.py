"""Tokens of tool calls: kept for the tenant alone, within bounds, for a message that is sent back as it was."""

from __future__ import annotations

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.request.sampled_calls import SampledCalls


def answer(name: str, arguments: str = '{"a": 1, "b": [2]}', text: str = "") -> pb.ChatMessage:
    return pb.ChatMessage(
        role="assistant", content=text, tool_calls=[pb.ToolCall(id=name, name="get", arguments=arguments)]
    )


def test_only_the_same_call_is_found() -> None:
    memory = SampledCalls()
    memory.keep(b"a", answer("one", text="hm "), [5, 6, 7])
    assert memory.find(b"a", answer("one", '{"b":[2],"a":1}', "hm")) == [5, 6, 7]
    assert memory.find(b"b", answer("one", text="hm")) is None, "another tenant's"
    assert memory.find(b"a", answer("two", text="hm")) is None
    assert memory.find(b"a", answer("one", '{"a": 2, "b": [2]}', "hm")) is None
    assert memory.find(b"a", answer("one", text="no")) is None
    assert memory.find(b"a", pb.ChatMessage(role="user", content="hm")) is None


def test_memory_is_bounded_for_each_tenant_and_for_all() -> None:
    memory = SampledCalls(max_bytes=10_000, max_bytes_in_all=25_000)
    memory.keep(b"small", answer("s"), [1])
    for tenant in (b"a", b"b", b"c"):
        for i in range(40):
            memory.keep(tenant, answer(f"{i}"), [i] * 200)
            memory.keep(tenant, answer(f"{i}"), [i] * 200)
    assert memory.num_bytes <= 25_000
    assert memory.find(b"small", answer("s")) == [1]
    assert memory.find(b"c", answer("39")) == [39] * 200
    assert memory.find(b"c", answer("0")) is None
    memory.keep(b"a", answer("huge"), [0] * 10_000)
    assert memory.find(b"a", answer("huge")) is None


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    memory = SampledCalls()
    memory.keep(b"", answer("x", '{"a": '), [1])
    assert memory.find(b"", answer("x", '{"a": ')) == [1]
    assert memory.find(b"", answer("x", '{"a":')) is None
