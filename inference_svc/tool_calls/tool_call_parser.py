"""Tool call parser: finds tool calls in an answer's text while it is streamed.

The parser keeps text that may be a call until the call's name is complete. Then it emits the arguments as they arrive.
If the text is not a call, the parser emits it as text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from inference_svc.tool_calls.char_reader import CallDelta, CharReader, NotACall, Parse
from inference_svc.tool_calls.qwen3_coder_arguments import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    VALUE_ENDS,
    JsonStringTracker,
    is_json,
    is_plain_text,
    json_types,
    value_to_json,
)

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA = "<|python_tag|>"
MISTRAL = "[TOOL_CALLS]"
# Markers with which an answer of calls starts.
_MARKERS = {"hermes": (HERMES,), "mistral": (MISTRAL,), "qwen3_coder": (HERMES, FUNCTION)}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FENCES = ("```json", "```")
_ALPHANUMERIC = string.ascii_letters + string.digits


class ToolCallParser(CharReader):
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
        super().__init__()
        self.calls = 0
        self._functions, self._single, self._dialect = functions, single, dialect
        self._exact, self._mangled = exact, False
        self._first_keys = first_keys(dialect, exact)
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

    def _qwen3_coder(self) -> Parse[None]:
        """Parse Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

        There is a line end before and after each value; the outer tags may be missing.
        """
        while opening := (yield from self._text_before(HERMES, FUNCTION)):
            if (yield from self._try_calls(self._function(opening == HERMES), opening)) and opening == HERMES:
                yield from self._optional(HERMES_END)

    def _function(self, wrapped: bool) -> Parse[None]:
        """Parse a call from its name on. Raises NotACall."""
        name: list[str] = []
        if wrapped:
            yield from self._expect(FUNCTION)
        if not (yield from self._text_before(">", say=name.append)):
            raise NotACall
        called = "".join(name).strip()
        put = self._start_call(called)
        schema = dict(self._functions.get(called, {}))
        properties, between = schema.get("properties"), "{"
        while (following := (yield from self._next_nonspace())) == "<":
            self._push("<")
            tag: list[str] = []
            if not (yield from self._text_before(">", say=tag.append)):
                key = "".join(tag)
                if key.startswith(PARAMETER) or any(known.startswith(key) for known in (PARAMETER, FUNCTION_END)):
                    raise NotACall  # the call is truncated
                self._push(key)
                break
            key = "".join(tag)
            if not key.startswith(PARAMETER):
                if key + ">" != FUNCTION_END:
                    self._push(key + ">")
                break
            key = key.removeprefix(PARAMETER)
            if not isinstance(properties, dict) or key not in properties:
                key = key.strip()
            put(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            kinds = json_types(properties.get(key), schema) if isinstance(properties, dict) else frozenset[str]()
            yield from self._tagged_value(put, kinds)
            between = ", "
        else:
            self._push(following or "")
        put("{}" if between == "{" else "}")

    def _tagged_value(self, put: Callable[[str], None], kinds: frozenset[str]) -> Parse[None]:
        """Convert a value between tags to JSON; emit a string as it arrives. Raises NotACall."""
        first = yield from self._next()
        if first not in (None, "\n"):
            self._push(first)

        def quoted(text: str) -> None:
            put(json.dumps(text, ensure_ascii=False)[1:-1])

        if is_plain_text(kinds):
            put('"')
            end = yield from self._text_before(*VALUE_ENDS, say=quoted)
            if not end:
                raise NotACall
            put('"')
        else:
            value, end = yield from self._json_between()
            put(value_to_json(value, kinds))
        if PARAMETER_END not in end:
            self._push(end)

    def _json_between(self) -> Parse[tuple[str, str]]:
        """Parse a JSON value between tags, and return it with the text that ends it.

        A tag inside a JSON string is part of the string. If the value is not valid JSON, the first tag ends it. Raises
        NotACall.
        """
        found, strings = list[str](), JsonStringTracker()
        early: tuple[int, str] | None = None
        while end := (yield from self._text_before(*VALUE_ENDS, say=found.append)):
            if self._mangled or not strings.inside_after(found):
                break
            early = early or (len("".join(found)), end)
            found.append(end)
        text = "".join(found)
        if early is None or is_json(text):
            if not end:
                raise NotACall
            return text, end
        if not end and self._exact:  # the answer is truncated within a string
            raise NotACall
        size, first_end = early
        self._mangled = True  # so that not every later value is searched up to the end of the answer
        self._push(text[size + len(first_end) :] + end)
        return text[:size], first_end

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

    # ---- calls ----------------------------------------------------------------------------------------------

    def _try_calls(self, reading: Parse[None], opening: str, keep: bool = False) -> Parse[bool]:
        """Try to parse calls. False if the text is not a call; it is then emitted as text.

        ``keep``: characters that were read before also belong to the text.
        """
        before = self.calls
        if not keep:
            self._raw = []
        try:
            yield from reading
        except NotACall:
            self._emit_as_text(opening if self.calls == before else "")
            return self.calls > before
        self._raw = None
        return True

    def _emit_as_text(self, opening: str) -> None:
        if self._raw is not None:
            text, self._raw = opening + "".join(self._raw), None
            self._emit_text(text)

    def _calls(self, alone: bool) -> Parse[None]:
        """Parse a call, a list of calls, or several separated by semicolons."""
        if (yield from self._next_nonspace()) == "[":
            yield from self._list(alone)
            return
        self._push("{")
        while True:
            yield from self._call(alone)
            self._raw = []
            following = yield from self._next_nonspace()
            if following in (";", ","):
                following = yield from self._next_nonspace()
                if following == "{":
                    self._push(following)
                    continue
            if following is not None:
                self._push("".join(self._raw or ()))
            break

    def _list(self, alone: bool) -> Parse[None]:
        """Parse at least one call, up to the end of a list. Raises NotACall."""
        before = self.calls
        while (character := (yield from self._next_nonspace())) != "]":
            if character == ",":
                continue
            if character is None:
                raise NotACall
            self._push(character)
            yield from self._call(alone)
            self._raw = []
        if self.calls == before:
            raise NotACall

    def _call(self, alone: bool = False) -> Parse[None]:
        """Parse one call's object. Raises NotACall."""
        if (yield from self._next_nonspace()) != "{":
            raise NotACall
        early: list[str] = []  # arguments that precede the name
        put: Callable[[str], None] | None = None
        seen = False
        first = True
        while (character := (yield from self._next_nonspace())) != "}":
            if character == ",":
                continue
            if character != '"':
                raise NotACall
            key = yield from self._string()
            if (yield from self._next_nonspace()) != ":" or (alone and first and key not in self._first_keys):
                raise NotACall
            if alone and first and key == "tool_calls":
                yield from self._tool_calls_list()
                return
            first = False
            if key == "name" and put is None:
                if (yield from self._next_nonspace()) != '"':
                    raise NotACall
                put = self._start_call((yield from self._string()), known=alone)
                put("".join(early))
            elif key in ("arguments", "parameters") and not seen:
                seen = True
                yield from self._value(put or early.append)
            else:
                yield from self._value(lambda _: None)
        if put is None:
            raise NotACall
        if not seen:
            put("{}")

    def _tool_calls_list(self) -> Parse[None]:
        if (yield from self._next_nonspace()) != "[":
            raise NotACall
        yield from self._list(alone=False)
        if (yield from self._next_nonspace()) != "}":
            raise NotACall

    def _start_call(self, name: str, known: bool = False) -> Callable[[str], None]:
        """Start a call, and return the consumer of its arguments. Raises NotACall for an invalid function name."""
        if not _NAME.fullmatch(name) or (known and name not in self._functions):
            raise NotACall
        index, dropped = self.calls, self._single and self.calls > 0
        self.calls += 1
        self._raw, self._pending_space = None, []
        if dropped:
            return lambda _: None
        self._deltas.append(CallDelta(index=index, id=new_call_id(self._dialect), name=name))

        def put(arguments: str) -> None:
            if arguments:
                self._deltas.append(CallDelta(index=index, arguments=arguments))

        return put


def new_call_id(dialect: str) -> str:
    """Create an id of a call. Mistral's templates require nine letters and digits."""
    if dialect == "mistral":
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def first_keys(dialect: str, exact: bool) -> tuple[str, ...]:
    """First keys by which an object may be a call; with ``exact`` only those in the model's instructions."""
    if exact:
        return ("tool_calls",) if dialect == "json" else ("name",)
    return ("name", "arguments", "parameters", "type", "id", "tool_calls")
