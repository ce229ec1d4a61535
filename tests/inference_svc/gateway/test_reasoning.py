"""Reasoning of a model that thinks, through all three APIs: whole, streamed and sent back.

The built-in model thinks as its grammar says: its template opens the reasoning, and a schema's text closes it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.node import Node
from inference_svc.models.model_resolver import DEMO_MODEL
from tests.inference_svc.gateway.conftest import Gateway, of_node
from tests.inference_svc.gateway.messages_client import client_of, raw_events

TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{% endif %}"
)
SAID: Any = [{"role": "user", "content": "hello there"}]
SCHEMA = {"const": "why not</think> so"}
REASONING, TEXT = '"why not', 'so"'


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with Node(str(folder), arena_bytes="64MiB", pool_bytes="64MiB") as node:
        gateway = of_node(node)
        yield gateway
        gateway.close()


def test_a_chat_has_reasoning_beside_its_text(thinker: Gateway) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked: Any = {"model": "", "messages": SAID, "response_format": form}
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
    assert quiet["choices"][0]["message"]["content"] == json.dumps(SCHEMA["const"])


def test_a_response_has_a_reasoning_item(thinker: Gateway) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    whole = thinker.client.responses.create(model="", input="hello there", text=form)  # type: ignore[arg-type, call-overload]
    thought, said = whole.output
    assert (thought.type, thought.content[0].text, said.type, whole.output_text) == (
        "reasoning", REASONING, "message", TEXT,
    )  # fmt: skip
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with thinker.client.responses.stream(model="", input="hello there", text=form) as stream:  # type: ignore[call-overload]
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == REASONING
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


def test_a_message_has_a_thinking_block(thinker: Gateway) -> None:
    form: Any = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    model = thinker.client.models.list().data[0].id
    asked: Any = {"model": model, "max_tokens": 60, "messages": SAID, **form}
    thought, said = client_of(thinker).messages.create(**asked).content
    assert (thought.type, thought.thinking, said.type, said.text) == ("thinking", REASONING, "text", TEXT)  # type: ignore[union-attr]
    assert thought.signature  # type: ignore[union-attr]
    deltas = [body["delta"]["type"] for kind, body in raw_events(thinker, asked) if kind == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]


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
