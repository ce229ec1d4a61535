"""Texts of single tokens, their offsets in the prompt's text, and how an answer continues this text."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from inference_svc.models.loader import DEMO_MODEL, load
from inference_svc.request.prompt_tokenizer import PromptTokenizer
from inference_svc.request.request_builder import RequestBuilder
from inference_svc.scheduling.context_limits import ContextLimits
from tests.inference_svc.sequence.llama2_tokenizer import llama2_tokenizer

BYTE_LEVEL, LLAMA2 = AutoTokenizer.from_pretrained(DEMO_MODEL), llama2_tokenizer()


def of(tokenizer: PreTrainedTokenizerBase) -> PromptTokenizer:
    config = SimpleNamespace(vocab_size=len(tokenizer))
    loaded: Any = SimpleNamespace(tokenizer=tokenizer, stop_tokens=frozenset(), config=config)
    template: Any = None  # only chats need one
    return PromptTokenizer(loaded, template, 100, ContextLimits(100, 100, 0), "")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA2], ids=["byte-level", "llama2"])
def test_the_texts_of_the_tokens_are_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """SentencePiece's decoder removed the space before every word: a token's text was "world" instead of " world"."""
    made = of(tokenizer)
    ids = made.ids("hello world  and a 猫", special=False)
    found = b"".join(made.text_and_bytes(token)[1] for token in ids)
    assert found.decode().lstrip() == "hello world  and a 猫"


def test_transformers_does_not_warn_of_long_texts(caplog: pytest.LogCaptureFixture) -> None:
    """A coding agent's first prompt made the worker's log say that indexing errors would result."""
    tokenizer = copy.deepcopy(BYTE_LEVEL)
    tokenizer.model_max_length = 4
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert len(of(tokenizer).ids("hello world and more", special=True)) > 4
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_a_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of an answer may have 20 alternatives, and they are decoded on the event loop."""
    made, decoded = of(BYTE_LEVEL), list[list[int]]()
    text = made.text

    def noted(ids: list[int]) -> str:
        decoded.append(ids)
        return text(ids)

    monkeypatch.setattr(made, "text", noted)
    assert [made.text_and_bytes(token) for token in (70, 71, 70, 71)] == [("^", b"^"), ("_", b"_")] * 2
    assert decoded == [[70], [71]]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA2], ids=["byte-level", "llama2"])
def test_offsets_are_those_of_the_prompts_text(tokenizer: PreTrainedTokenizerBase) -> None:
    made, text = of(tokenizer), "hello world and a 猫 here"
    ids = made.ids(text, special=False)
    offsets = made.text_offsets(ids, text)
    assert (offsets[0], sorted(offsets)) == (0, offsets)
    for token, offset in zip(ids, offsets, strict=True):
        own = made.text_and_bytes(token)[0] if offset else tokenizer.decode([token])
        assert "\ufffd" in own or text[offset:].startswith(own)
    first = tokenizer.all_special_ids[-1]
    added = made.text_offsets([first, *ids], text)
    assert added == [0, *offsets], "the text does not have the special token"
    written = tokenizer.decode([first]) + text
    assert made.text_offsets([first, *ids], written)[0] == 0 < made.text_offsets([first, *ids], written)[1]


def test_a_token_that_is_special_only_in_the_tokenizers_file_is_not_in_the_text() -> None:
    """It was taken for ordinary text, which moved all offsets behind it."""
    tokenizer = copy.deepcopy(BYTE_LEVEL)
    tokenizer.add_tokens([AddedToken("<|begin|>", special=True)], special_tokens=True)
    begin = tokenizer.convert_tokens_to_ids("<|begin|>")
    assert begin not in tokenizer.all_special_ids
    made, text = of(tokenizer), "hello world"
    ids = made.ids(text, special=False)
    assert made.text_offsets([begin, *ids], text) == [0, *made.text_offsets(ids, text)]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (pb.Prompt(text="hello"), " world"),
        (pb.Prompt(token_ids=pb.TokenIds(ids=LLAMA2("hello")["input_ids"])), " world"),
        (pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])), "world"),
        (
            pb.Prompt(
                chat=pb.Chat(
                    messages=[
                        pb.ChatMessage(role="user", content="hello"),
                        pb.ChatMessage(role="assistant", content="hello"),
                    ],
                    answer_start=pb.ANSWER_START_LAST_MESSAGE,
                )
            ),
            " world",
        ),
    ],
    ids=["text", "tokens", "chat", "continued message"],
)
def test_an_answer_begins_with_a_space_if_it_continues_a_text(prompt: pb.Prompt, shown: str) -> None:
    tokenizer = llama2_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    builder = RequestBuilder(replace(load("demo"), tokenizer=tokenizer), 100)
    sequence = builder.build(pb.GenerateRequest(prompt=prompt, max_tokens=2), lambda _: None, 0.0)
    (world,) = tokenizer(" world")["input_ids"][-1:]
    assert sequence.detokenizer.push(world) == shown
