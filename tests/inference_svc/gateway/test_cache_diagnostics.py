"""Reasons of misses as vendors ask for them, by header, and by ``kvsidecar why``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvsidecar.cli.root_command import app
from kvsidecar.errors import UnknownRequest
from openai.types.beta.beta_response import PromptCacheDiagnostics
from pydantic import TypeAdapter
from typer.testing import CliRunner

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway, of_node
from tests.inference_svc.gateway.test_tenant_keys import hashed, written

TOOL = {"name": "get_time", "description": "the time", "input_schema": {"type": "object", "properties": {}}}
OTHER_TOOL = {**TOOL, "name": "get_date"}
WORDS = "the quick brown fox reads a long page about caches and writes it down for later. " * 4


def post(gateway: Gateway, path: str, body: dict[str, Any], status: int = 200, **headers: str) -> httpx.Response:
    answer = httpx.post(gateway.url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer


# ---- Anthropic's diagnostics ---------------------------------------------------------------------------------------


def message(gateway: Gateway, previous: str | None, **options: Any) -> dict[str, Any]:
    body = {
        "model": "demo", "max_tokens": 2, "system": "You know the time.", "tools": [TOOL],
        "messages": [{"role": "user", "content": WORDS}], "diagnostics": {"previous_message_id": previous},
    } | options  # fmt: skip
    found: dict[str, Any] = post(gateway, "/v1/messages", body).json()
    return found


def test_a_message_names_the_part_that_changed(gateway: Gateway) -> None:
    first = message(gateway, None)
    assert first["diagnostics"] == {"cache_miss_reason": None}
    said = [
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "?"},
    ]
    assert message(gateway, first["id"], messages=said)["diagnostics"] is None
    changes: dict[str, dict[str, Any]] = {
        "system_changed": {"system": "You know the time. It is noon."},
        "tools_changed": {"tools": [OTHER_TOOL]},
        "messages_changed": {"messages": [{"role": "user", "content": "Now: " + WORDS}]},
    }
    for kind, change in changes.items():
        found = message(gateway, first["id"], **change)
        missed = found["usage"]["input_tokens"]
        expected = {"type": kind, "cache_missed_input_tokens": missed}
        assert found["diagnostics"] == {"cache_miss_reason": expected}
    unknown = message(gateway, "msg_nobody")
    assert unknown["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_a_stream_of_messages_has_diagnostics_from_the_start(gateway: Gateway) -> None:
    first = message(gateway, None)
    body = {
        "model": "demo", "max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": "x" + WORDS}],
        "system": "You know the time.", "tools": [TOOL], "diagnostics": {"previous_message_id": first["id"]},
    }  # fmt: skip
    events = post(gateway, "/v1/messages", body).text.splitlines()
    started = next(json.loads(line[6:]) for line in events if line.startswith("data: ") and "message_start" in line)
    assert started["message"]["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"


def test_without_diagnostics_a_message_has_none(gateway: Gateway) -> None:
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    assert "diagnostics" not in post(gateway, "/v1/messages", body).json()


# ---- OpenAI's prompt_cache_diagnostics -----------------------------------------------------------------------------


def response(gateway: Gateway, baseline: str | None = None, **options: Any) -> dict[str, Any]:
    named = {"prompt_cache_options": {"comparison_response_id": baseline}} if baseline else {}
    tools = [{"type": "function", "name": "get_time", "parameters": TOOL["input_schema"]}]
    body = {"model": "demo", "input": WORDS, "max_output_tokens": 2, "store": False, "tools": tools, **named, **options}
    found: dict[str, Any] = post(gateway, "/v1/responses", body).json()
    return found


def test_a_response_is_compared_with_a_baseline(gateway: Gateway, two: Node) -> None:
    first = response(gateway)
    assert "prompt_cache_diagnostics" not in first
    two.settle()
    check: TypeAdapter[Any] = TypeAdapter(PromptCacheDiagnostics)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("cache_hit", "", {}),
        ("cache_miss", "input_changed", {"instructions": "Be brief."}),
        ("cache_miss", "tools_changed", {"tools": []}),
        ("cache_miss", "reasoning_effort_changed", {"reasoning": {"effort": "none"}}),
    ]
    for kind, reason, change in cases:
        found = response(gateway, first["id"], **change)["prompt_cache_diagnostics"]
        check.validate_python(found)
        assert (found["type"], found.get("reason", "")) == (kind, reason)
    assert response(gateway, "resp_nobody")["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    other = response(gateway, first["id"], cache_salt="another")
    assert other["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


# ---- the header ------------------------------------------------------------------------------------------------------


def test_the_header_asks_and_is_answered(gateway: Gateway) -> None:
    body = {"prompt": f"{time.time_ns()} is asked by header. " + WORDS, "max_tokens": 1}
    answer = post(gateway, "/v1/completions", body, **{"X-KVSidecar-Explain": "true"})
    miss = answer.json()["miss"]
    expected = f"{miss['kind']}; position={miss['position']}; computed={miss['computed_tokens']}"
    assert answer.headers["x-kvsidecar-miss"] == expected
    plain = post(gateway, "/v1/completions", {**body, "prompt": "not " + body["prompt"]})
    assert "x-kvsidecar-miss" not in plain.headers
    assert "miss" not in plain.json()
    said = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": f"{time.time_ns()} " + WORDS}]}
    assert post(gateway, "/v1/messages", said, **{"X-KVSidecar-Explain": "true"}).json()["miss"]["kind"]
    refused = post(gateway, "/v1/completions", body, 400, **{"X-KVSidecar-Explain": "all"})
    assert "allowed are true, false" in refused.json()["error"]["message"]


def test_a_chat_names_the_message_that_differs(gateway: Gateway, two: Node) -> None:
    salt = str(time.time_ns())

    def ask(second: str) -> dict[str, Any]:
        texts = ["You answer briefly about long pages.", second, "Fine.", "And what then?"]
        roles = ["system", "user", "assistant", "user"]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        body = {"messages": messages, "max_tokens": 1, "explain": True, "cache_salt": salt}
        found: dict[str, Any] = post(gateway, "/v1/chat/completions", body).json()["miss"]
        return found

    ask(WORDS + "It is Monday today.")
    two.settle()
    found = ask(WORDS + "It is Friday today.")
    assert (found["kind"], found["part"]) == ("differs", "messages[1] (user)")
    assert "Friday" in found["text_before"][-8:] + found["text_after"]
    assert found["text_before"].endswith(("It is ", "It is", "It is F"))
    assert "behind the text that stays the same" in found["advice"]


# ---- kvsidecar why -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tenants(two: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    names = {"alice": 'salt = "of alice"', "bob": 'salt = "of bob"', "chief": "operator = true"}
    tables = [f'[tenant.{name}]\n{line}\ntokens = ["{hashed(name)}"]' for name, line in names.items()]
    found = of_node(two, "--tenants", str(written(tmp_path_factory.mktemp("keys"), "\n".join(tables))))
    yield found
    found.close()


def why(gateway: Gateway, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["why", "--url", gateway.url, *arguments])


def test_why_finds_a_request_by_each_of_its_ids(gateway: Gateway) -> None:
    body = {"prompt": f"{time.time_ns()} why. " + WORDS, "max_tokens": 1}
    answer = post(gateway, "/v1/completions", body, **{"X-Request-Id": "of-this-test"}).json()
    done = why(gateway, answer["id"])
    assert done.exit_code == 0, done.output
    assert "reason: " in done.stdout
    assert "prompt tokens were cached" in done.stdout
    assert "what would help" in done.stdout
    found = json.loads(why(gateway, "of-this-test", "--json").stdout)
    assert (found["id"], found["prompt_tokens"]) == (answer["id"], answer["usage"]["prompt_tokens"])
    assert "why" not in json.dumps(found["miss"]), "it has no text of the prompt"
    said = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": f"{time.time_ns()} " + WORDS}]}
    assert why(gateway, post(gateway, "/v1/messages", said).json()["id"]).exit_code == 0
    assert why(gateway, response(gateway)["id"]).exit_code == 0


def test_an_unknown_request_is_said_in_one_sentence(gateway: Gateway, tmp_path: Path) -> None:
    done = why(gateway, "nobody/../x")
    assert isinstance(done.exception, UnknownRequest)
    assert "no answer with the id 'nobody/../x' is remembered" in str(done.exception)
    tmp_path.chmod(0o700)
    alone = CliRunner().invoke(app, ["why", "x", "--runtime-dir", str(tmp_path)])
    assert f"no node runs in {tmp_path}" in str(alone.exception)


def test_why_tells_a_tenant_about_its_own_requests_only(tenants: Gateway) -> None:
    body = {"prompt": f"{time.time_ns()} of alice. " + WORDS, "max_tokens": 1}
    headers = {"Authorization": "Bearer alice", "X-Request-Id": "a-common-id"}
    answer = post(tenants, "/v1/completions", body, **headers).json()
    assert why(tenants, answer["id"], "--api-key", "alice").exit_code == 0
    assert why(tenants, answer["id"], "--api-key", "chief").exit_code == 0
    theirs, nobodys = (why(tenants, name, "--api-key", "bob").exception for name in (answer["id"], "cmpl-" + "0" * 24))
    assert str(theirs).replace(answer["id"], "ID") == str(nobodys).replace("cmpl-" + "0" * 24, "ID")
    assert isinstance(why(tenants, "a-common-id", "--api-key", "bob").exception, UnknownRequest)


def test_a_salt_separates_the_requests_of_one_key(locked: Gateway) -> None:
    body = {"prompt": f"{time.time_ns()} salted. " + WORDS, "max_tokens": 1, "cache_salt": "mine"}
    answer = post(locked, "/v1/completions", body, Authorization="Bearer guest").json()["id"]
    assert isinstance(why(locked, answer, "--api-key", "guest").exception, UnknownRequest)
    assert why(locked, answer, "--api-key", "guest", "--salt", "mine").exit_code == 0
    assert why(locked, answer, "--api-key", "chief").exit_code == 0
