"""docs/http.md says what the gateway takes: its tables are compared with the classes that check requests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kvsidecar import errors
from kvsidecar.errors import KVSidecarError, status_of
from pydantic import BaseModel

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.openai_requests import ChatRequest, CompletionRequest
from inference_svc.gateway.openai_writer import error_response
from inference_svc.gateway.openapi import document
from inference_svc.gateway.responses_api.responses_request import ResponsesRequest
from inference_svc.gateway.unsupported_options import IGNORED, NEUTRAL

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
KINDS: list[type[BaseModel]] = [ChatRequest, CompletionRequest, ResponsesRequest]


def part(heading: str) -> str:
    """What stands under a heading, up to the next of any level."""
    return re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "`" in line]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(("column", "kind"), list(enumerate(KINDS, 1)))
def test_the_table_of_options_names_the_fields_of_requests(column: int, kind: type[BaseModel]) -> None:
    told = [name for row in rows(part("Options")) if row[column] == "yes" for name in named(row[0])]
    assert len(told) == len(set(told))
    assert set(told) == set(kind.model_fields)


def test_no_row_is_of_no_endpoint() -> None:
    assert all("yes" in row[1:4] and set(row[1:4]) <= {"yes", ""} for row in rows(part("Options")))


def test_what_is_without_effect_is_listed() -> None:
    listed = part("Without effect").split("\n\n")
    assert next(named(text) for text in listed if text.lstrip().startswith("`")) == list(IGNORED)


def test_what_is_refused_is_listed_with_what_it_is_taken_with() -> None:
    told: dict[str, object] = {}
    for names, value in rows(part("Refused")):
        told |= {name: json.loads(named(value)[0]) for name in named(names)}
    assert told == {name: next((v for v in taken if v is not None), None) for name, taken in NEUTRAL.items()}


def test_codes_of_errors_are_those_that_are_sent() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    sent = {}
    for kind in kinds.values():
        if issubclass(kind, KVSidecarError):
            code = json.loads(bytes(error_response(kind("x")).body))["error"]["code"]
            sent.setdefault(code, set()).add(status_of(kind("x"))[1])
    sent |= {"not_found": {404}, "method_not_allowed": {405}, "unsupported_media_type": {415}}
    for row in rows(part("Errors")):
        for code in named(row[0]):
            assert int(row[1]) in sent[code], code


def test_paths_and_settings_are_there() -> None:
    paths = set(document()["paths"])
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"):
        assert path in paths
        assert path in PAGE
    for flag in ("default_max_tokens", "request_seconds", "allow_origins"):
        assert flag in GatewayConfig.model_fields
        assert f"--{flag.replace('_', '-')}" in PAGE
    assert GatewayConfig.model_fields["default_max_tokens"].default == 0
    assert GatewayConfig.model_fields["request_seconds"].default == 600
