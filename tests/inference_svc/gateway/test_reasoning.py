"""Reasoning of a model that thinks, through all three APIs: whole, streamed and sent back.

The template opens the reasoning of a model whose answers are fixed: a text, and with tools, a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway, of_node
from tests.inference_svc.gateway.messages_client import client_of, raw_events
from tests.inference_svc.scripted_model import write_scripted_model

TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>' if tools else '<think>\n' }}{% endif %}{% endif %}"
)
ANSWER = ("wh", "y", " not", "</think>", " so", "<|end|>")
CALL = ("a", " day", "<", "/", "th", "ink", ">", "[TOOL_CALLS]", "n", "ow", "{", "}", "<|end|>")
SAID: Any = [{"role": "user", "content": "hello there"}]
TOOLS: Any = [{"type": "function", "function": {"name": "now"}}]
REASONING, TEXT = "why not", "so"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("models") / "thinker"
    added = ("<think>", "</think>", "[TOOL_CALLS]")
    write_scripted_model(folder, TEMPLATE, added, ("\n", *ANSWER), ("\n\n", *ANSWER), ("<think>", *CALL))
    with Node(str(folder), arena_bytes="64MiB", pool_bytes="64MiB") as node:
        gateway = of_node(node)
        yield gateway
        gateway.close()


def test_the_python_client_has_reasoning_and_the_reason_of_a_miss(thinker: Gateway) -> None:
    question, client = [{"role": "user", "content": "who are you, and why?"}], thinker.node.client()
    whole = client.generate(question, temperature=0, explain=True)
    assert (whole.reasoning, whole.text) == (REASONING, TEXT)
    assert whole.miss is not None
    assert whole.miss.kind in ("never_seen", "differs")
    thinker.node.settle()
    chunks = list(client.stream(question, temperature=0, explain=True))
    assert "".join(chunk.reasoning for chunk in chunks) == REASONING
    final = chunks[-1].final
    assert final is not None
    assert (final.reasoning, final.text, final.miss) == (REASONING, TEXT, None), "all but the last token were cached"


def test_a_chat_has_reasoning_beside_its_text(thinker: Gateway) -> None:
    asked: Any = {"model": "", "messages": SAID, "temperature": 0}
    found = thinker.post("/v1/chat/completions", **asked)
    message = found["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (REASONING, REASONING, TEXT)
    details = found["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < found["usage"]["completion_tokens"]
    deltas = [chunk.choices[0].delta for chunk in thinker.client.chat.completions.create(stream=True, **asked)]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == REASONING
    assert "".join(d.content or "" for d in deltas) == TEXT
    quiet = thinker.post("/v1/chat/completions", **asked, reasoning_effort="none")
    assert "reasoning" not in quiet["choices"][0]["message"], "the prompt closed the reasoning"
    assert quiet["choices"][0]["message"]["content"] == "".join(ANSWER[:-1])


def test_a_response_has_a_reasoning_item(thinker: Gateway) -> None:
    asked: Any = {"model": "", "input": "hello there", "temperature": 0}
    whole = thinker.client.responses.create(**asked)
    thought, said = whole.output
    assert (thought.type, thought.content[0].text, said.type, whole.output_text) == (
        "reasoning", REASONING, "message", TEXT,
    )  # fmt: skip
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with thinker.client.responses.stream(**asked) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == REASONING
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


def test_a_message_has_a_thinking_block(thinker: Gateway) -> None:
    model = thinker.client.models.list().data[0].id
    asked: Any = {"model": model, "max_tokens": 60, "messages": SAID}
    thought, said = client_of(thinker).messages.create(**asked).content
    assert (thought.type, thought.thinking, said.type, said.text) == ("thinking", REASONING, "text", TEXT)  # type: ignore[union-attr]
    assert thought.signature  # type: ignore[union-attr]
    deltas = [body["delta"]["type"] for kind, body in raw_events(thinker, asked) if kind == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]


@pytest.mark.parametrize(
    ("option", "content"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}}, "7"),
        ({"guided_regex": "ab?c"}, "abc|ac"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}, "tool_choice": "none"}, r"\{.*"),
    ],
)
def test_an_answer_of_a_grammar_has_no_reasoning(thinker: Gateway, option: Any, content: str) -> None:
    """The grammar allows no end of the reasoning: the whole answer was reasoning, and the content was empty."""
    found = thinker.post("/v1/chat/completions", messages=SAID, max_tokens=20, temperature=0, **option)
    message = found["choices"][0]["message"]
    assert "reasoning" not in message
    assert re.fullmatch(content, message["content"], re.DOTALL)
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_call_that_is_demanded_is_no_reasoning(thinker: Gateway) -> None:
    options: Any = {"messages": SAID, "tools": TOOLS, "max_tokens": 80, "temperature": 0}
    demanded = {"tool_choice": "required", "parallel_tool_calls": False}
    message = thinker.post("/v1/chat/completions", **options, **demanded)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    assert "reasoning" not in message
    strict = [{"type": "function", "function": {"name": "now", "strict": True}}]
    message = thinker.post("/v1/chat/completions", **{**options, "tools": strict})["choices"][0]["message"]
    assert message["reasoning"] == "a day", "the grammar of strict calls allows text before a call"


def test_a_call_comes_back_without_the_reasoning_before_it(thinker: Gateway) -> None:
    """The worker kept all tokens of an answer with a call, so the next prompt had reasoning that no client sent."""
    options: Any = {"tools": TOOLS, "temperature": 0, "max_tokens": 40}
    message = thinker.post("/v1/chat/completions", messages=SAID, **options)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (message["reasoning"], call["function"]["name"]) == ("a day", "now")

    def tokens(call_id: str) -> list[int]:
        back = {"role": "assistant", "content": message["content"], "tool_calls": [{**call, "id": call_id}]}
        result = {"role": "tool", "tool_call_id": call_id, "content": "noon"}
        found = thinker.post("/tokenize", messages=[*SAID, back, result], tools=TOOLS)["tokens"]
        assert isinstance(found, list)
        return found

    assert tokens(call["id"]) == tokens("another00"), "as from a worker that knows nothing of the answer"


def test_reasoning_that_is_sent_back_is_for_the_template_to_write(thinker: Gateway) -> None:
    model = thinker.client.models.list().data[0].id
    asked = {"role": "user", "content": "a"}

    def prompt(path: str, **body: Any) -> str:
        parts = thinker.post(path, max_tokens=1, explain=True, **body)["prompt_parts"]
        return "".join(part["text"] for part in parts)

    back = [asked, {"role": "assistant", "content": "b", "reasoning_content": "c"}, asked]
    assert "<think>\nc\n</think>\n\nb" in prompt("/v1/chat/completions", messages=back)

    def tokens(answer: list[dict[str, Any]]) -> int:
        said = [asked, {"role": "assistant", "content": answer}, asked]
        return int(thinker.post("/v1/messages/count_tokens", model=model, messages=said)["input_tokens"])

    block, text = {"type": "thinking", "thinking": "c", "signature": "s"}, {"type": "text", "text": "b"}
    assert tokens([block, text]) > tokens([text])

    def read(*items: dict[str, Any]) -> int:
        said = [asked, *items, asked]
        return int(thinker.post("/v1/responses/input_tokens", input=said)["input_tokens"])

    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "c"}], "summary": []}
    answer = {"role": "assistant", "content": "b"}
    assert read(thought, answer) > read(answer)
    assert read(thought) == read(), "reasoning without an answer"
