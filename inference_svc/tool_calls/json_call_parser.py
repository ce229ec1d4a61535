"""Parser of calls as JSON objects, alone or in lists: base of the formats' parsers."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any

from inference_svc.tool_calls.char_reader import CallDelta, CharReader, NotACall, Parse

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA = "<|python_tag|>"
MISTRAL = "[TOOL_CALLS]"
# Function names: of OpenAI, at most 64 characters; of Anthropic, at most 128.
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ALPHANUMERIC = string.ascii_letters + string.digits


class JsonCallParser(CharReader):
    """Parses ``{"name": …, "arguments": …}``, and starts calls of all formats."""

    def __init__(self, dialect: str, functions: Mapping[str, Mapping[str, Any]], single: bool, exact: bool) -> None:
        super().__init__()
        self.calls = 0
        self._functions, self._single, self._dialect, self._exact = functions, single, dialect, exact
        self._first_keys = first_keys(dialect, exact)

    def _try_calls(self, reading: Parse[None], opening: str, keep: bool = False) -> Parse[bool]:
        """Try to parse calls, and emit other text as text. False if it parsed no call.

        With ``keep``, characters that were read before also belong to the text.
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
        """Parse a call, a list of calls, or several calls separated by semicolons."""
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
                self._push(character or "")  # it may begin a marker, after an object without end
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
        if not FUNCTION_NAME.fullmatch(name) or (known and name not in self._functions):
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
    """First keys by which an object may be a call; with ``exact``, only the keys of the model's instructions."""
    if exact:
        return ("tool_calls",) if dialect == "json" else ("name",)
    return ("name", "arguments", "parameters", "type", "id", "tool_calls")
