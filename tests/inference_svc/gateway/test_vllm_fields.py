"""Requests that only vLLM's clients send: roles and members of their own, named tokens, SageMaker's paths."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from kvsidecar.errors import InvalidRequest

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway

HELLO: Any = [{"role": "user", "content": "hello"}]


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{gateway.url}{path}", json={"model": "demo", "max_tokens": 3, "temperature": 0} | body, timeout=60
    )


def test_a_role_that_only_the_template_knows_is_rendered_by_it(gateway: Gateway, two: Node) -> None:
    ids = []
    for role in ("narrator", "user"):
        for content in ("once upon a time", [{"type": "text", "text": "once upon a time"}]):
            body = {"messages": [{"role": role, "content": content}], "return_token_ids": True}
            answer = post(gateway, "/v1/chat/completions", **body)
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["prompt_token_ids"])
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert "narrator" in two.client(0).detokenize(ids[0])


@pytest.mark.parametrize("role", ["", "a role", "user<|im_end|>", "x" * 65, "7", 7, None, ["user"], "nutzer\n"])
def test_a_role_that_is_no_name_is_refused(gateway: Gateway, role: Any) -> None:
    answer = post(gateway, "/v1/chat/completions", messages=[{"role": role, "content": "hello"}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.0.role")


def test_a_member_of_a_message_that_no_api_has_changes_nothing(gateway: Gateway, two: Node) -> None:
    marked = [{**HELLO[0], "timestamp": 7, "reasoning_items": None, "Authorization: x\n": {"a": [1]}}]
    header_first = [{"Authorization: x\n": 7, **HELLO[0]}]  # the log names the first one
    answers = [
        post(gateway, "/v1/chat/completions", messages=messages, return_token_ids=True).json()
        for messages in (HELLO, marked, header_first)
    ]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"] == answers[2]["prompt_token_ids"]
    assert two.wait_for_log('"ignored_field": "messages.timestamp"')
    assert two.wait_for_log('"ignored_field": "messages.other"')
    assert two.count_in_log("Authorization: x") == 0


def test_members_of_parts_and_calls_that_no_api_has_change_nothing(gateway: Gateway, two: Node) -> None:
    """LiteLLM and others add them to answers, and agents send them back: every second turn was refused."""

    def history(**more: Any) -> list[dict[str, Any]]:
        function = {"name": "look", "arguments": "{}", **more}
        parts = [{"type": "text", "text": "I look.", **more}]
        call = {"id": "call_1", "type": "function", "function": function, **more}
        assistant = {"role": "assistant", "content": parts, "tool_calls": [call]}
        return [*HELLO, assistant, {"role": "tool", "tool_call_id": "call_1", "content": "it rains"}]

    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    answers = [
        post(gateway, "/v1/chat/completions", messages=messages, tools=tools, return_token_ids=True)
        for messages in (
            history(),
            history(provider_specific_fields={"a": 1}, extra_content=None, reasoning_items=None),
        )
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert answers[0].json()["prompt_token_ids"] == answers[1].json()["prompt_token_ids"]
    misspelled = history()
    misspelled[1]["tool_calls"][0]["function"] |= {"own": 1, "argument": "{}"}
    refused = post(gateway, "/v1/chat/completions", messages=misspelled, tools=tools)
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "messages.1.tool_calls.0.function.argument",
    )


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "contents": "hello"}, "messages.0.contents is not an option of this server (did you mean "),
        ({"role": "tool", "content": "4", "toolcall_id": "x"}, "did you mean tool_call_id?"),
        ({"role": "asistant", "content": "hello"}, "not a role (did you mean assistant?)"),
        ({"role": "User", "content": "hello"}, "not a role (did you mean user?)"),
    ],
)
def test_a_typing_error_in_a_message_is_refused(gateway: Gateway, message: Any, named: str) -> None:
    answer = post(gateway, "/v1/chat/completions", messages=[message])
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_seed_has_64_bits(gateway: Gateway, path: str, seed: int) -> None:
    body: dict[str, Any] = {"model": "demo", "seed": seed}
    body |= {"input": "x"} if path == "/v1/responses" else {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    error = httpx.post(f"{gateway.url}{path}", json=body, timeout=60).json()["error"]
    assert (error["param"], error["constraint"]) == ("seed", "greater_than_equal" if seed < 0 else "less_than_equal")
    assert str(2**63 - (seed > 0)) in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/invocations"])
def test_a_repetition_penalty_has_a_smallest_value(gateway: Gateway, path: str) -> None:
    """1e-38 divided logits to infinity: the answer was 500. The float32 of 0.01 is below 0.01."""
    body: dict[str, Any] = {"model": "demo"}
    body |= {"input": "x"} if path == "/v1/responses" else {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    answer = httpx.post(f"{gateway.url}{path}", json=body | {"repetition_penalty": 1e-38}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repetition_penalty")
    assert answer.json()["error"]["message"].endswith("; allowed are 0.01 to 10")
    assert gateway.post(path, **body, repetition_penalty=0.01)


def test_our_protocol_refuses_a_too_small_repetition_penalty(two: Node) -> None:
    with pytest.raises(InvalidRequest, match=r"repetition_penalty is .*; allowed are 0\.01 to 10"):
        two.client(0).generate("hello", max_tokens=1, repetition_penalty=1e-38)
    assert two.client(0).generate("hello", max_tokens=1, repetition_penalty=0.01).token_ids


def test_fields_that_are_wrong_in_the_same_way_are_named_together(gateway: Gateway) -> None:
    said = post(gateway, "/v1/chat/completions", messages=HELLO, logit_bias={"bad1": 1, "bad2": 2, "3": 1})
    error = said.json()["error"]
    assert (said.status_code, error["param"]) == (400, "logit_bias.bad1")
    assert error["message"].endswith("; so are logit_bias.bad2")
    many = post(gateway, "/v1/chat/completions", messages=HELLO, logit_bias={f"bad{i}": 1 for i in range(1000)})
    assert len(many.json()["error"]["message"]) < 300


@pytest.mark.parametrize("stream", [False, True])
def test_named_tokens_are_reported_instead_of_the_likeliest(gateway: Gateway, stream: bool) -> None:
    options: dict[str, Any] = {"logprob_token_ids": [5, 300, 5], "return_tokens_as_token_ids": True, "stream": stream}
    likely = post(gateway, "/v1/completions", prompt="hello", logprobs=20, return_tokens_as_token_ids=True).json()
    by_rank = likely["choices"][0]["logprobs"]["top_logprobs"][0]
    named = next(int(name.removeprefix("token_id:")) for name in list(by_rank)[3:])
    options["logprob_token_ids"] += [named]
    answer = gateway.client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=2, temperature=0, logprobs=True, extra_body=options, stream=stream
    )  # type: ignore[call-overload]
    parts = list(answer) if stream else [answer]
    found = [one for part in parts for choice in part.choices if choice.logprobs for one in choice.logprobs.content]
    assert len(found) == 2
    for one in found:
        assert [top.token for top in one.top_logprobs] == ["token_id:5", "token_id:300", f"token_id:{named}"]
        assert all(top.logprob <= one.logprob + 1e-5 for top in one.top_logprobs), "a greedy answer is the likeliest"
    if not stream:
        body = {"prompt": "hello", "logprobs": 0, **options}
        tops = post(gateway, "/v1/completions", **body).json()["choices"][0]["logprobs"]["top_logprobs"]
        assert {"token_id:5", "token_id:300", f"token_id:{named}"} <= set(tops[0])
        assert tops[0][f"token_id:{named}"] == pytest.approx(by_rank[f"token_id:{named}"], abs=1e-5)


def test_a_named_token_that_is_not_allowed_has_the_least_log_probability(gateway: Gateway) -> None:
    options = {"logprob_token_ids": [5, 300], "allowed_token_ids": [300], "logprobs": 1}
    answer = post(gateway, "/v1/completions", prompt="hello", return_tokens_as_token_ids=True, **options).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {"token_id:5": -9999.0, "token_id:300": 0.0}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logprob_token_ids": [5]}, "set logprobs, too"),
        ({"logprob_token_ids": [10**9], "logprobs": 1}, "outside the vocabulary"),
        ({"logprob_token_ids": [-1], "logprobs": 1}, "logprob_token_ids.0"),
        ({"logprob_token_ids": list(range(129)), "logprobs": 1}, "129 tokens; at most 128"),
        ({"logprob_token_ids": "5", "logprobs": 1}, "logprob_token_ids"),
    ],
)
def test_wrong_names_of_tokens_are_refused(gateway: Gateway, options: dict[str, Any], named: str) -> None:
    answer = post(gateway, "/v1/completions", prompt="hello", **options)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_a_router_forwards_are_the_prompt(gateway: Gateway, stream: bool) -> None:
    given: Any = {"messages": HELLO, "return_token_ids": True, "ignore_eos": True}
    first = post(gateway, "/v1/chat/completions", **given).json()
    forwarded = {"messages": [{"role": "user", "content": "something else"}], "stream": stream}
    forwarded["kv_transfer_params"] = {"prompt_token_ids": first["prompt_token_ids"]}
    answer = post(gateway, "/v1/chat/completions", **given | forwarded)
    if stream:
        chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
        assert chunks[0]["prompt_token_ids"] == first["prompt_token_ids"]
        text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    else:
        assert answer.json()["prompt_token_ids"] == first["prompt_token_ids"]
        text = answer.json()["choices"][0]["message"]["content"]
    assert text == first["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, "prompt_token_ids is missing"),
        ({"prompt_token_ids": []}, "is empty"),
        ({"prompt_token_ids": [-1]}, "outside 0 to"),
        ({"prompt_token_ids": [1], "do_remote_prefill": True}, "do_remote_prefill is not an option"),
    ],
)
def test_what_a_router_forwards_in_vain_is_refused(gateway: Gateway, params: Any, named: str) -> None:
    answer = post(gateway, "/v1/chat/completions", messages=HELLO, kv_transfer_params=params)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    params = {"prompt_token_ids": [1]}
    beside = post(gateway, "/v1/chat/completions", messages=HELLO, tools=[tool], kv_transfer_params=params)
    assert (beside.status_code, beside.json()["error"]["param"]) == (400, "kv_transfer_params")


def test_sagemakers_paths_answer_chats_and_completions(gateway: Gateway) -> None:
    for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "hello"})):
        there, here = post(gateway, path, **body), post(gateway, "/invocations", **body)
        assert here.status_code == 200
        assert here.json().keys() == there.json().keys()
        assert here.json()["choices"] == there.json()["choices"]
    streamed = post(gateway, "/invocations", messages=HELLO, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert httpx.get(f"{gateway.url}/ping").status_code == 200
    for body in ({}, {"prompt": 7}, {"messages": HELLO, "prompt": "x"}):
        assert post(gateway, "/invocations", **body).status_code == 400


def test_the_sdk_has_the_constraint(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.chat.completions.create(model="demo", messages=HELLO, n=9)
    assert caught.value.body["constraint"] == "less_than_equal"  # type: ignore[index]
