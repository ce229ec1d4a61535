"""Refusals of earlier answers, which clients send back: their text is the assistant's text."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.inference_svc.gateway.conftest import Gateway

QUESTION = {"role": "user", "content": "hello there"}
REFUSAL = {"type": "refusal", "refusal": "I cannot say that."}


def tokens(gateway: Gateway, **answer: Any) -> Any:
    """Returns the tokens of a chat with an earlier answer."""
    said = [QUESTION, {"role": "assistant", **answer}, QUESTION]
    return gateway.post("/tokenize", messages=said)["tokens"]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [REFUSAL]},
        {"content": [{"type": "text", "text": "I cannot "}, {"type": "refusal", "refusal": "say that."}]},
        {"content": None, "refusal": REFUSAL["refusal"]},
        {"content": "", "refusal": REFUSAL["refusal"]},
        {"refusal": REFUSAL["refusal"]},
    ],
)
def test_the_text_of_a_refusal_is_in_the_prompt(gateway: Gateway, answer: dict[str, Any]) -> None:
    """A part of the type refusal got 400, and the prompt lacked the refusal of a message."""
    assert tokens(gateway, **answer) == tokens(gateway, content="I cannot say that.")


def test_a_message_with_content_has_no_other_text(gateway: Gateway) -> None:
    assert tokens(gateway, content="hello", refusal="no") == tokens(gateway, content="hello")
    messages: Any = [{**QUESTION, "refusal": "no"}]
    assert gateway.post("/tokenize", messages=messages) == gateway.post("/tokenize", messages=[QUESTION])


def test_a_response_may_continue_a_refusal(gateway: Gateway) -> None:
    count = gateway.client.responses.input_tokens.count

    def counted(*content: dict[str, Any]) -> int:
        said: Any = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
        return count(model="demo", input=[QUESTION, said, QUESTION]).input_tokens  # type: ignore[list-item]

    assert counted(REFUSAL) == counted({"type": "output_text", "text": "I cannot say that.", "annotations": []})
    conversation = gateway.client.conversations.create(items=[{"role": "assistant", "content": [REFUSAL]}])  # type: ignore[typeddict-item,list-item]
    (item,) = gateway.client.conversations.items.list(conversation.id)
    assert [part.model_dump() for part in item.content] == [REFUSAL]  # type: ignore[union-attr]
    with_refusal = gateway.client.responses.create(
        model="demo", conversation=conversation.id, input="hello", max_output_tokens=1
    )
    assert with_refusal.usage is not None
    empty = gateway.client.responses.create(
        model="demo", input=[{"role": "assistant", "content": ""}, {"role": "user", "content": "hello"}],
        max_output_tokens=1,
    )  # fmt: skip
    assert empty.usage is not None
    assert with_refusal.usage.input_tokens > empty.usage.input_tokens


@pytest.mark.parametrize(("path", "name"), [("/chat/completions", "messages"), ("/responses", "input")])
@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user", "content": [REFUSAL]}, "0.content.0"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}, "0.content.0.refusal"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}, "0.content.0.refusal"),
        ({"role": "assistant", "content": [{"type": "image_url"}]}, "0.content.0"),
    ],
)
def test_wrong_parts_are_refused_by_their_place(
    gateway: Gateway, path: str, name: str, message: dict[str, Any], place: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.post(path, body={name: [message]}, cast_to=object)
    assert caught.value.param == f"{name}.{place}"
