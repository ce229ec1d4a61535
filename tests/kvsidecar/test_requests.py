"""Options of requests, which stand in two places: both say the same."""

from __future__ import annotations

import inspect
import typing

from kvsidecar.client import AsyncClient, Client
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
