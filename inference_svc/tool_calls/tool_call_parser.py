"""Tool call parser: finds tool calls in an answer's text while it is streamed.

The parser holds back text that may be a call until the call's name is complete. Then it emits the arguments as they
arrive. If the text is not a call, the parser emits it as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from inference_svc.tool_calls.char_reader import CallDelta, NotACall, Parse
from inference_svc.tool_calls.json_call_parser import HERMES, HERMES_END, LLAMA, MISTRAL
from inference_svc.tool_calls.qwen3_coder_arguments import FUNCTION
from inference_svc.tool_calls.qwen3_coder_parser import Qwen3CoderParser

# Markers at the start of an answer that consists of calls.
_MARKERS = {"hermes": (HERMES,), "mistral": (MISTRAL,), "qwen3_coder": (HERMES, FUNCTION)}
_FENCES = ("```json", "```")


class ToolCallParser(Qwen3CoderParser):
    """Parser of one answer. Call ``feed`` with text, then ``finish``; both return new deltas."""

    def __init__(
        self,
        dialect: str,
        functions: Mapping[str, Mapping[str, Any]],
        single: bool = False,
        exact: bool = False,
        whole: bool = False,
    ) -> None:
        """``functions`` maps names to the JSON schemas of their arguments; ``dialect`` is a ToolCallFormat.

        ``single``: drop all calls after the first. ``exact``: a grammar constrains the calls. ``whole``: an answer that
        does not start with a call contains no calls, even if its text quotes one.
        """
        super().__init__(dialect, functions, single, exact)
        readings: dict[str, Callable[[], Parse[None]]] = {
            "hermes": self._hermes,
            "llama3_json": self._llama,
            "mistral": self._mistral,
            "qwen3_coder": self._qwen3_coder,
            "json": self._json,
        }
        markers = _MARKERS.get(dialect, ()) if whole else ()
        self._reading = self._parse_if_marked(readings[dialect](), markers) if markers else readings[dialect]()
        next(self._reading)

    def feed(self, text: str) -> list[CallDelta]:
        for character in text:
            self._reading.send(character)
        return self._take_deltas()

    def finish(self) -> list[CallDelta]:
        """End the answer, and return the remaining deltas."""
        with suppress(StopIteration):
            self._reading.send(None)
        if self._pending_space and not self.calls:
            self._deltas.append(CallDelta("".join(self._pending_space)))
            self._pending_space = []
        return self._take_deltas()

    def _parse_if_marked(self, reading: Parse[None], markers: Sequence[str]) -> Parse[None]:
        """Parse only text that starts with a marker, after optional white space."""
        white, begun = yield from self._match_any(*markers)
        self._push(white + begun)
        if begun in markers:
            yield from reading
            return
        while (character := (yield from self._next())) is not None:
            self._emit_text(character)

    # ---- dialects -------------------------------------------------------------------------------------------

    def _hermes(self) -> Parse[None]:
        """Parse Hermes, Qwen: ``<tool_call>{"name": …, "arguments": …}</tool_call>``, anywhere and repeated."""
        while (yield from self._text_before(HERMES)):
            if (yield from self._try_calls(self._call(), HERMES)):
                yield from self._skip(HERMES_END, HERMES)

    def _mistral(self) -> Parse[None]:
        """Parse Mistral: ``[TOOL_CALLS][{"name": …, "arguments": …}, …]``; since 2025 ``[TOOL_CALLS]NAME[ARGS]{…}``."""
        while (yield from self._text_before(MISTRAL)):
            yield from self._try_calls(self._mistral_calls(), MISTRAL)

    def _mistral_calls(self) -> Parse[None]:
        first = yield from self._next_nonspace()
        if first in ("[", "{"):
            self._push(first)
            yield from self._calls(alone=False)
            return
        name = ""
        while first is not None and first not in "[{":
            name += first
            first = yield from self._next()
        while first == "[":  # [CALL_ID]abc[ARGS]
            while first not in ("{", None):
                first = yield from self._next()
        if first != "{":
            raise NotACall
        self._push(first)
        arguments = self._start_call(name.strip())
        yield from self._value(arguments)
        self._raw = None

    def _llama(self) -> Parse[None]:
        """Parse Llama 3: an answer of ``{"name": …, "parameters": …}`` objects only, separated by ``;``."""
        yield from self._whole_answer(LLAMA)

    def _json(self) -> Parse[None]:
        """Parse generic JSON: ``{"tool_calls": [{"name": …, "arguments": …}, …]}``, a call, or a list of calls.

        The JSON may be in a code fence.
        """
        yield from self._whole_answer(*_FENCES)

    def _whole_answer(self, *openings: str) -> Parse[None]:
        """Parse calls that are the whole answer; everything except a call of a known function is text."""
        self._raw = []
        first = yield from self._next_nonspace()
        for opening in openings:
            if first == opening[0]:
                self._push(first)
                yield from self._optional(opening)
                first = yield from self._next_nonspace()
        if first is not None:
            self._push(first)
        if first in ("{", "[") and (yield from self._try_calls(self._calls(alone=True), "", keep=True)):
            yield from self._optional(_FENCES[-1])
        else:
            self._emit_as_text("")
        while (character := (yield from self._next())) is not None:
            self._emit_text(character)
