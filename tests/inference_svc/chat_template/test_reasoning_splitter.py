"""Reasoning and text of an answer, however the text arrives in pieces."""

from __future__ import annotations

import itertools

import pytest

from inference_svc.chat_template.reasoning_splitter import ReasoningSplitter, marks_reasoning, opens_reasoning


def split(begun: bool, *pieces: str) -> tuple[str, str, int]:
    splitter = ReasoningSplitter(begun)
    found = [splitter.split(piece, 1, i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    return "".join(r for r, _ in found), "".join(t for _, t in found), splitter.tokens


@pytest.mark.parametrize(
    ("begun", "answer", "reasoning", "text"),
    [
        (False, "<think>\nwhy so\n</think>\n\nThus. ", "why so", "Thus. "),
        (True, "\nwhy </thin so\n</think>Thus </think>", "why </thin so", "Thus </think>"),
        (False, "\n <think> a  b </think>", "a  b", ""),
        (False, "No <think>quoted</think>.", "", "No <think>quoted</think>."),
        (False, "  <thought", "", "  <thought"),
        (False, "<thin", "", "<thin"),
        (True, "cut off </thi", "cut off </thi", ""),
        (False, "<think></think>\n\nAt once", "", "At once"),
        (True, "", "", ""),
    ],
)
def test_every_division_of_an_answer_gives_the_same(begun: bool, answer: str, reasoning: str, text: str) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(answer) + 1), 2):
        assert split(begun, answer[:first], answer[first:second], answer[second:])[:2] == (reasoning, text)
    assert split(begun, *answer)[:2] == (reasoning, text)


def test_tokens_of_the_reasoning_are_counted_with_its_markers() -> None:
    assert split(False, "<think>", "a", "</think>", "b", "c")[2] == 3
    assert split(False, "a", "b")[2] == 0


@pytest.mark.parametrize(
    ("pieces", "reasoning_tokens"),
    [
        (("<", "think", ">", "a", "</", "think", ">", "b"), 7),
        (("\n", "<think>", "a", "</think>", "b"), 4),
        (("", "<think>", "a"), 3),
        (("<", "thin", "g"), 0),
        (("\n", "\n"), 0),
    ],
)
def test_all_tokens_of_a_marker_are_counted(pieces: tuple[str, ...], reasoning_tokens: int) -> None:
    """The splitter counted all tokens of an end marker, but only the last token of an opening marker."""
    assert split(False, *pieces)[2] == reasoning_tokens


def test_reasoning_is_sent_on_while_it_is_written() -> None:
    splitter = ReasoningSplitter(True)
    assert splitter.split("step one", 1, False) == ("step one", "")
    assert splitter.split(" </", 1, False) == ("", "")
    assert splitter.split("b>", 1, False) == (" </b>", "")


def test_templates_and_prompts_say_who_thinks() -> None:
    assert marks_reasoning("{{ '<think>\\n\\n</think>' }}")
    assert marks_reasoning("{{ content.split('</think>')[-1] }}")
    assert not marks_reasoning("{{ think }}")
    assert not marks_reasoning(None)
    assert opens_reasoning("<|assistant|>\n<think>\n")
    assert not opens_reasoning("<think>\n\n</think>\n\n")
