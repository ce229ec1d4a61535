"""Parser of Qwen3-Coder's tool calls, in which each argument is text between tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from inference_svc.tool_calls.char_reader import NotACall, Parse
from inference_svc.tool_calls.json_call_parser import HERMES, HERMES_END, JsonCallParser
from inference_svc.tool_calls.qwen3_coder_arguments import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    VALUE_ENDS,
    JsonStringTracker,
    is_json,
    is_plain_text,
    is_text_or_null,
    json_types,
    value_to_json,
)


class Qwen3CoderParser(JsonCallParser):
    """Parses calls between tags, and converts their arguments to JSON by the functions' schemas."""

    def __init__(self, dialect: str, functions: Mapping[str, Mapping[str, Any]], single: bool, exact: bool) -> None:
        super().__init__(dialect, functions, single, exact)
        self._mangled = False

    def _qwen3_coder(self) -> Parse[None]:
        """Parse Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

        There is a line end before and after each value. The outer tags may be missing.
        """
        while opening := (yield from self._text_before(HERMES, FUNCTION)):
            if (yield from self._try_calls(self._function(opening == HERMES), opening)) and opening == HERMES:
                yield from self._optional(HERMES_END)

    def _function(self, wrapped: bool) -> Parse[None]:
        """Parse a call. With ``wrapped``, it begins with the function's tag. Raises NotACall."""
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
            value, end = yield from self._json_between(is_text_or_null(kinds))
            put(value_to_json(value, kinds))
        if PARAMETER_END not in end:
            self._push(end)

    def _json_between(self, plain: bool) -> Parse[tuple[str, str]]:
        """Parse a JSON value between tags, and return it with the text that ends it.

        A tag inside a JSON string is part of the string. If the value is not valid JSON, or ``plain`` text, the first
        tag ends the value. Raises NotACall.
        """
        found, strings = list[str](), JsonStringTracker()
        early: tuple[int, str] | None = None
        while end := (yield from self._text_before(*VALUE_ENDS, say=found.append)):
            if plain or self._mangled or not strings.inside_after(found):
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
        self._mangled = True  # later values are then not searched up to the end of the answer
        self._push(text[size + len(first_end) :] + end)
        return text[:size], first_end
