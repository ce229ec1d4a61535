"""Reasoning splitter: separates an answer's reasoning from its text while it is streamed."""

from __future__ import annotations

from enum import Enum, auto

BEGIN, END = "<think>", "</think>"
_MAX_TAIL_CHARACTERS = 64


class _Place(Enum):
    """Place of the next character in an answer."""

    START = auto()
    REASONING = auto()
    BEHIND = auto()
    TEXT = auto()


def marks_reasoning(template: str | None) -> bool:
    """True if the chat template belongs to a model that marks its reasoning."""
    return BEGIN in (template or "") or END in (template or "")


def opens_reasoning(prompt_end: str) -> bool:
    """True if a prompt ends within reasoning: some templates write the opening marker for the model."""
    return prompt_end[-_MAX_TAIL_CHARACTERS:].rstrip().endswith(BEGIN)


class ReasoningSplitter:
    """Splitter of one answer. Call ``split`` with each new text.

    With ``begun``, the prompt has already opened the reasoning. Without ``begun``, an answer has reasoning only if it
    starts with the opening marker. The splitter removes spaces around the markers. It holds text back while the text
    may still become a marker.
    """

    def __init__(self, begun: bool) -> None:
        self._place = _Place.REASONING if begun else _Place.START
        self._kept, self._wrote = "", False
        self._start_tokens = 0
        self.tokens = 0
        """Number of reasoning tokens so far, including all tokens of the markers."""

    def split(self, text: str, num_tokens: int, last: bool) -> tuple[str, str]:
        """Return the new reasoning and the new text of the answer. With ``last``, no more text comes."""
        self._kept += text
        reasoning = ""
        if self._place is _Place.START:
            self._start_tokens = num_tokens = self._start_tokens + num_tokens
            self._start(last)
        if self._place is _Place.REASONING:
            self.tokens += num_tokens
            reasoning = self._reasoning(last)
        if self._place is _Place.BEHIND:
            self._kept = self._kept.lstrip()
            self._place = _Place.TEXT if self._kept else _Place.BEHIND
        if self._place is not _Place.TEXT:
            return reasoning, ""
        said, self._kept = self._kept, ""
        return reasoning, said

    def _start(self, last: bool) -> None:
        begun = self._kept.lstrip()
        if begun.startswith(BEGIN):
            self._place, self._kept = _Place.REASONING, begun.removeprefix(BEGIN)
        elif last or not BEGIN.startswith(begun):
            self._place = _Place.TEXT

    def _reasoning(self, last: bool) -> str:
        found, marker, behind = self._kept.partition(END)
        if marker:
            self._place, self._kept = _Place.BEHIND, behind
            found = found.rstrip()
        elif not last:
            whole = found
            begun = next((n for n in range(len(END) - 1, 0, -1) if whole.endswith(END[:n])), 0)
            found = whole[: len(whole) - begun].rstrip()
            self._kept = whole[len(found) :]
        if not self._wrote:
            found = found.lstrip()
            self._wrote = bool(found)
        return found
