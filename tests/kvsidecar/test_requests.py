"""Requests from Python values: options, which stand in two places, and values that no message can hold."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import numpy as np
import pytest
from kvsidecar.cli.entry import main
from kvsidecar.client import AsyncClient, Client
from kvsidecar.errors import InvalidRequest
from kvsidecar.hint_options import HintOptions
from kvsidecar.requests import Options, to_request


def test_what_methods_hand_on_is_what_a_request_takes() -> None:
    taken = {name: p for name, p in inspect.signature(to_request).parameters.items() if name not in ("prompt", "hints")}
    hints = {name: found.__forward_arg__ for name, found in HintOptions.__annotations__.items()}
    assert {name: p.annotation for name, p in taken.items()} | hints == {
        name: found.__forward_arg__ for name, found in Options.__annotations__.items()
    }
    for method in (Client.generate, Client.stream, AsyncClient.generate, AsyncClient.stream):
        assert typing.get_type_hints(method)["options"] == typing.Unpack[Options]


USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"temperature": "hot"}, "temperature is 'hot'; a number is allowed"),
        ({"logit_bias": {-1: 1.0}}, "a token of logit_bias is -1"),
        ({"logit_bias": {"7": 1.0}}, "a token of logit_bias is '7'"),
        ({"logit_bias": {7: "a lot"}}, "logit_bias of token 7 is 'a lot'"),
        ({"allowed_tokens": [3, -1]}, "a token of allowed_tokens is -1"),
        ({"prompt": [3, 1 << 32]}, "a token of prompt is 4294967296"),
        ({"prompt": [3, "four"]}, "a token of prompt is 'four'"),
        ({"regex": "\ud800"}, r"regex has the lone surrogate U\+D800"),
        ({"regex": 7}, "regex is of type int; text is allowed"),
        ({"grammar": "\ud800"}, "grammar has the lone surrogate"),
        ({"choice": ["yes", "\ud800"]}, "choice has the lone surrogate"),
        ({"stop": ["\ud800"]}, "stop has the lone surrogate"),
        ({"tool_choice": "\ud800"}, "tool_choice has the lone surrogate"),
        ({"tenant_salt": "mine"}, "tenant_salt is of type str; bytes are allowed"),
        ({"prompt": [{"content": "hi"}]}, "a message has no role"),
        ({"prompt": [USER, "hi"]}, "a message is of type str; a mapping is allowed"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "content is of type list"),
        ({"prompt": [USER | {"name": "\ud800"}]}, "name has the lone surrogate"),
        ({"prompt": [USER | {"tool_calls": ["look"]}]}, "a call of tool_calls is of type str"),
        ({"prompt": [USER | {"tool_calls": [{"id": "1"}]}]}, "function of tool_calls is of type NoneType"),
        ({"prompt": [USER | {"tool_calls": [CALL | {"id": 1}]}]}, "id of tool_calls is of type int"),
        ({"prompt": [USER], "tools": [{"function": "look"}]}, "function of tools is of type str"),
        ({"json_schema": {"enum": ["\ud800"]}}, "json_schema has the lone surrogate"),
        ({"prompt": [USER], "tools": [{"name": "look", "parameters": {"\ud800": {}}}]}, "tools has the lone surrogate"),
        ({"prompt": [USER], "tools": ["look"]}, "a tool is of type str"),
    ],
)
def test_a_value_that_no_message_can_hold_is_named(options: dict[str, Any], named: str) -> None:
    prompt = options.pop("prompt", "hi")
    with pytest.raises(InvalidRequest, match=named) as refused:
        to_request(prompt, **options)
    assert refused.value.param


def test_schemas_are_sent_without_escapes() -> None:
    """Their size is limited, and an escape takes up to three times the bytes."""
    schema = {"properties": {"город": {"enum": ["東京"]}}}
    request = to_request([USER], json_schema=schema, tools=[{"name": "look", "parameters": schema}])
    assert request.grammar.json_schema == request.prompt.chat.tools[0].parameters
    assert request.grammar.json_schema == '{"properties": {"город": {"enum": ["東京"]}}}'


def test_values_that_a_message_can_hold_become_those_of_the_message() -> None:
    request = to_request(
        np.array([1, 2]),  # type: ignore[arg-type]
        seed=(1 << 64) - 1,
        logit_bias={7: -1},
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop="END",
        choice="yes",
    )
    assert list(request.prompt.token_ids.ids) == [1, 2]
    assert request.sampling.seed == (1 << 64) - 1
    assert dict(request.sampling.logit_bias) == {7: -1}
    assert list(request.stop) == ["END"], "one text, and not its characters"
    assert list(request.grammar.choice.texts) == ["yes"]
    chat = to_request([{"role": "assistant", "content": None, "tool_calls": [CALL]}]).prompt.chat
    assert chat.messages[0].content == ""
    assert chat.messages[0].tool_calls[0].name == "look"
    assert not to_request([]).prompt.token_ids.ids


def test_the_command_line_says_it_in_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kvsidecar", "generate", "--seed", "-1", "hi"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "seed is -1; allowed are 0 to" in capsys.readouterr().err
