"""The HTTP gateway, with the official client and with raw bytes."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from benchmarks.condition_wait import until
from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway

MESSAGES = [{"role": "user", "content": "hello there, I would like to book a table " * 8}]


def test_chat_whole_and_streamed_agree(gateway: Gateway) -> None:
    ask = gateway.client.chat.completions.create
    whole = ask(model="demo", messages=MESSAGES, max_tokens=12, temperature=0)
    parts = list(
        ask(model="demo", messages=MESSAGES, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True})
    )  # fmt: skip
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")


def test_cached_tokens_are_reported(gateway: Gateway, two: Node) -> None:
    messages = [{"role": "user", "content": "a quite different and rather long question about trains " * 8}]
    first = gateway.client.chat.completions.create(model="demo", messages=messages, max_tokens=4, temperature=0)
    two.settle()
    second = gateway.client.chat.completions.create(model="demo", messages=messages, max_tokens=4, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    assert second.choices[0].message.content == first.choices[0].message.content


def test_separated_documents_are_found_in_another_order(gateway: Gateway, two: Node) -> None:
    documents = [f"## {name} " + "works in a house by the sea and reads old books. " * 4 for name in ("Anna", "Bob")]

    def ask(text: str, **extra: object) -> int:
        body = {"document_separator": "## ", **extra}
        answer = gateway.client.completions.create(model="demo", prompt=text, max_tokens=2, extra_body=body)
        two.settle()
        return int(answer.usage.prompt_tokens_details.approximate_tokens)

    assert ask("Read: " + "".join(documents)) == 0
    assert ask("Please: " + "".join(reversed(documents)) + "## Where?") > 40
    assert ask("Kindly: " + "".join(reversed(documents)) + "Who?", exact_only=True) == 0
    assert ask("Pray: " + "".join(reversed(documents)) + "Who?", reuse_anywhere=False) == 0


def test_who_guesses_is_the_requests_choice_and_changes_no_answer(gateway: Gateway) -> None:
    def ask(speculation: str, **more: int) -> openai.types.Completion:
        extra = {"speculation": speculation, "ignore_eos": True, **more}
        text = "one two three four five six seven one two three"
        return gateway.client.completions.create(
            model="demo", prompt=text, max_tokens=60, temperature=0, extra_body=extra
        )

    plain, guessed = ask("off"), ask("ngram")
    assert guessed.choices[0].text == plain.choices[0].text
    counted = [answer.usage.completion_tokens_details for answer in (plain, guessed)]
    assert counted[0].accepted_prediction_tokens == counted[0].rejected_prediction_tokens == 0
    assert counted[1].accepted_prediction_tokens + counted[1].rejected_prediction_tokens > 0
    with pytest.raises(openai.BadRequestError, match="this worker has no draft model") as refused:
        ask("draft")
    assert refused.value.param == "speculation"
    with pytest.raises(openai.BadRequestError, match="speculation is 'sometimes'"):
        ask("sometimes")
    with pytest.raises(openai.BadRequestError, match="speculation_branches is 5; allowed are 1 to 4"):
        ask("ngram", speculation_branches=5)


def test_completions_take_text_ids_and_lists(gateway: Gateway) -> None:
    ask = gateway.client.completions.create
    one = ask(model="demo", prompt="hello", max_tokens=5, temperature=0)
    both = ask(model="demo", prompt=["hello", "good day"], max_tokens=5, temperature=0)
    assert both.choices[0].text == one.choices[0].text
    assert [c.index for c in both.choices] == [0, 1]
    ids = ask(model="demo", prompt=[100, 200, 300], max_tokens=5, temperature=0, logprobs=2)
    assert len(ids.choices[0].logprobs.tokens) == 5
    assert ids.usage.prompt_tokens == 3


def test_n_seed_stop_and_logprobs_work(gateway: Gateway) -> None:
    ask = gateway.client.chat.completions.create
    several = ask(model="demo", messages=MESSAGES, max_tokens=8, n=3, seed=7, temperature=1.0)
    again = ask(model="demo", messages=MESSAGES, max_tokens=8, n=3, seed=7, temperature=1.0)
    texts = [c.message.content for c in several.choices]
    assert texts == [c.message.content for c in again.choices]
    assert len(set(texts)) > 1
    # The model may have little to say.
    on = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = ask(model="demo", messages=MESSAGES, **on).choices[0].message.content
    stop = whole[3:6]
    assert len(stop) == 3
    stopped = ask(model="demo", messages=MESSAGES, stop=stop, **on).choices[0]
    assert stopped.message.content == whole[: whole.find(stop)]
    assert stopped.finish_reason == "stop"
    scored = ask(model="demo", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2)
    assert all(len(t.top_logprobs) == 2 for t in scored.choices[0].logprobs.content)
    complete: Any = {"model": "demo", "prompt": "Where is it?", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    whole = gateway.client.completions.create(**complete).choices[0].logprobs.text_offset
    parts = [c.choices[0].logprobs for c in gateway.client.completions.create(stream=True, **complete) if c.choices]
    assert [offset for part in parts if part for offset in part.text_offset] == whole


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"extra_body": {"web_search_options": {}}}, "web_search_options"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "x"}}}, "structured_outputs.structural_tag"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"logit_bias": {"5000": 5}}, "logit_bias"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5_000_000_000}, "max_tokens"),
        ({"n": 100}, "n"),
        ({"extra_body": {"no_such_option": 1}}, "no_such_option"),
    ],
)
def test_what_is_unsupported_is_refused_by_name(gateway: Gateway, option: dict[str, object], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.chat.completions.create(model="demo", messages=MESSAGES, **option)  # type: ignore[call-overload]
    assert named in caught.value.message
    assert caught.value.param == named


def test_an_unknown_model_is_404(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError, match="served: demo"):
        gateway.client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert [m.id for m in gateway.client.models.list()] == ["demo"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        (b"{}", "messages is missing"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [], "stream": "perhaps"}', "stream is 'perhaps'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content"),
        (b'{"messages": [{"role": "no body", "content": "x"}]}', "role"),
        (b"[" * 100_000, "nested more than 128 levels deep"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages.0.content has the lone surrogate"),
        (b'{"a": "' + b"x" * (9 << 20) + b'"}', "larger than"),
    ],
)
def test_garbage_gets_a_sentence(gateway: Gateway, body: bytes, named: str) -> None:
    response = httpx.post(f"{gateway.url}/v1/chat/completions", content=body, timeout=20)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_null_is_the_default(gateway: Gateway) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": None, "stop": None, "ignore_eos": None, "n": None}
    response = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=20)
    assert response.status_code == 200, response.text


def test_prompts_times_n_have_a_limit(gateway: Gateway) -> None:
    response = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": ["x"] * 65, "n": 8})
    assert response.status_code == 400
    assert "prompt has 65 prompts with n = 8" in response.json()["error"]["message"]


def test_too_long_a_prompt_is_400_also_when_streaming(gateway: Gateway) -> None:
    body = {"prompt": [7] * 5000, "stream": True}
    response = httpx.post(f"{gateway.url}/v1/completions", json=body)
    assert response.status_code == 400
    assert "5000 tokens" in response.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_request(gateway: Gateway, two: Node) -> None:
    def cancelled() -> int:
        return sum(two.client(i).stats().cancelled for i in range(2))

    before = cancelled()
    body = json.dumps({"prompt": "count", "max_tokens": 3000, "ignore_eos": True, "stream": True})
    with httpx.stream("POST", f"{gateway.url}/v1/completions", content=body) as response:
        next(response.iter_bytes())
    until(lambda: cancelled() > before)
    whole = body.replace('"stream": true', '"stream": false').encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(whole)
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(head + whole)
        until(lambda: any(two.client(i).stats().running for i in range(2)))
    until(lambda: cancelled() >= before + 2)


def test_metrics_and_health(gateway: Gateway) -> None:
    text = httpx.get(f"{gateway.url}/metrics").text
    assert 'kvsidecar_gateway_requests_total{code="200"' in text
    assert "kvsidecar_gateway_workers_up 2.0" in text
    labels = '{engine="0",model_name="demo"}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"):
        assert f"vllm:{name}{labels}" in text
    answer = gateway.client.completions.create(model="demo", prompt="one two three", max_tokens=5, temperature=0)
    after = httpx.get(f"{gateway.url}/metrics").text

    def risen(name: str) -> float:
        return sum(s * float(found[1]) for s, page in ((1, after), (-1, text))
                   if (found := re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", page, re.M)))  # fmt: skip

    assert risen("time_to_first_token_seconds_count") == 1
    assert risen("e2e_request_latency_seconds_count") == 1
    assert risen("inter_token_latency_seconds_count") == answer.usage.completion_tokens - 1
    assert risen("request_prompt_tokens_sum") == answer.usage.prompt_tokens
    assert risen("request_generation_tokens_sum") == answer.usage.completion_tokens
    assert httpx.get(f"{gateway.url}/health").json()["workers_up"] == 2


def test_a_dead_worker_is_routed_around(gateway: Gateway, two: Node) -> None:
    two.kill("worker-0")
    for i in range(4):
        content = f"question number {i} about the weather"
        answer = gateway.client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": content}], max_tokens=3
        )
        assert answer.usage.completion_tokens > 0
    two.start_worker(0)
    until(lambda: httpx.get(f"{gateway.url}/health").json()["workers_up"] == 2)


def test_an_api_key_is_demanded_when_set(locked: Gateway) -> None:
    with pytest.raises(openai.AuthenticationError):
        locked.client.models.list()
    refused = httpx.post(f"{locked.url}/tokenize", json={"prompt": "x"})
    assert refused.status_code == 401
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="guest") as client:
        assert client.models.list().data[0].id == "demo"


def test_a_model_is_described_by_name(gateway: Gateway) -> None:
    assert gateway.client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="served: demo"):
        gateway.client.models.retrieve("nobody/else")


def test_what_is_not_served_is_an_openai_error(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        gateway.client.embeddings.create(model="demo", input="x")
    with pytest.raises(openai.NotFoundError, match="/v1/images/generations is not served here"):
        gateway.client.images.generate(model="demo", prompt="x")
    wrong = httpx.get(f"{gateway.url}/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"] == "/v1/completions takes no GET"


def test_the_document_of_what_is_served_has_every_option_and_is_open_to_all(locked: Gateway) -> None:
    found = httpx.get(f"{locked.url}/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        (body,) = found["paths"][path]["post"]["requestBody"]["content"].values()
        schema = found["components"]["schemas"][body["schema"]["$ref"].rsplit("/", 1)[1]]
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["additionalProperties"] is False
    assert {"echo", "min_tokens", "stop_token_ids", "user"} <= (
        found["components"]["schemas"]["CompletionRequest"]["properties"].keys()
    )


def test_texts_become_tokens_and_tokens_texts(gateway: Gateway) -> None:
    def post(path: str, **body: object) -> dict[str, object]:
        found: dict[str, object] = httpx.post(f"{gateway.url}/{path}", json=body).json()
        return found

    text = post("tokenize", model="demo", prompt="hello there")
    assert text["count"] == len(text["tokens"])  # type: ignore[arg-type]
    assert post("detokenize", tokens=text["tokens"]) == {"prompt": "hello there"}
    chat = post("tokenize", messages=MESSAGES[:1])
    answer = gateway.client.chat.completions.create(model="demo", messages=MESSAGES[:1], max_tokens=1)
    assert chat["count"] == answer.usage.prompt_tokens
    assert "one of prompt and messages" in str(post("tokenize"))
    assert "token id 5000" in str(post("detokenize", tokens=[5000]))
    assert httpx.get(f"{gateway.url}/version").json()["version"]


def test_options_that_users_of_vllm_send_bend_the_answer(gateway: Gateway) -> None:
    def ask(**options: object) -> str:
        body = {"prompt": "hello there", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **options}
        return str(httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])

    first, second = (httpx.post(f"{gateway.url}/tokenize", json={"prompt": p}).json()["tokens"][0] for p in ("a", "b"))
    assert ask(allowed_token_ids=[first]) == "aaaa"
    assert ask(logit_bias={str(second): 100}) == "bbbb"
    assert ask(logit_bias={str(second): 100}, repetition_penalty=1.0, min_p=0.5, top_k=-1) == "bbbb"
    plain = ask(max_tokens=20)
    assert ask(max_tokens=20, repetition_penalty=3.0) != plain
