"""``echo`` and ``prompt_logprobs``: how likely a given text is, as lm-eval asks for it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway

TEXT = "hello there, how are you today? über 🦊"


def complete(gateway: Gateway, **options: Any) -> Any:
    answer = httpx.post(
        f"{gateway.url}/v1/completions",
        json={"temperature": 0, "max_tokens": 4, "ignore_eos": True, **options},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(gateway: Gateway, text: str) -> list[int]:
    found: list[int] = httpx.post(f"{gateway.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def test_the_prompt_stands_before_the_answer_with_its_log_probabilities(gateway: Gateway) -> None:
    choice = complete(gateway, prompt=TEXT, echo=True, logprobs=2)["choices"][0]
    plain = complete(gateway, prompt=TEXT, logprobs=2)["choices"][0]
    count = len(tokens_of(gateway, TEXT))
    assert choice["text"] == TEXT + plain["text"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == count + 4
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert all(one <= 0 for one in found["token_logprobs"][1:])
    assert found["tokens"][count:] == plain["logprobs"]["tokens"]
    assert found["token_logprobs"][count:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-5)
    assert [at - found["text_offset"][count] for at in found["text_offset"][count:]] == plain["logprobs"]["text_offset"]


def test_what_was_generated_is_as_likely_when_it_is_read(gateway: Gateway) -> None:
    ids = tokens_of(gateway, TEXT)
    ids += (written := two_ids(gateway, ids))
    whole = complete(gateway, prompt=ids, echo=True, logprobs=1, max_tokens=0)
    found = whole["choices"][0]["logprobs"]
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["choices"][0]["finish_reason"] == "length"
    assert len(found["tokens"]) == len(ids)
    tail = slice(len(ids) - len(written), None)
    # It had been drawn greedily: each is the likeliest, which is how lm-eval tells.
    tops = found["top_logprobs"][tail]
    assert [max(top.values()) for top in tops] == found["token_logprobs"][tail]


def two_ids(gateway: Gateway, ids: list[int]) -> list[int]:
    body = {"prompt": ids, "temperature": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": 1}
    choice = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    return [token for text in choice["logprobs"]["tokens"] for token in tokens_of(gateway, text)]


def test_streamed_echo_is_the_whole_one_for_every_choice(gateway: Gateway) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": [TEXT, "good day"], "n": 2, "max_tokens": 3, "seed": 3}
    body |= {"echo": True, "logprobs": 1, "temperature": 1}
    whole = gateway.client.completions.create(**body).choices
    texts, tokens, offsets = ([""] * 4, [list[Any]() for _ in range(4)], [list[int]() for _ in range(4)])
    for part in gateway.client.completions.create(stream=True, **body):
        for choice in part.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.token_logprobs or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole]
    assert [text.startswith(TEXT) for text in texts] == [True, True, False, False]
    assert tokens == [choice.logprobs.token_logprobs for choice in whole if choice.logprobs]
    assert offsets == [choice.logprobs.text_offset for choice in whole if choice.logprobs]


def test_echo_alone_gives_the_text_back(gateway: Gateway) -> None:
    assert complete(gateway, prompt=TEXT, echo=True, max_tokens=0)["choices"][0]["text"] == TEXT
    ids = tokens_of(gateway, TEXT)
    assert complete(gateway, prompt=[ids, ids[:3]], echo=True, max_tokens=0)["choices"][0]["text"] == TEXT
    kept = complete(gateway, prompt=TEXT, echo=True, max_tokens=0, truncate_prompt_tokens=4)
    assert TEXT.endswith(kept["choices"][0]["text"].lstrip())
    assert kept["usage"]["prompt_tokens"] == 4


def test_prompt_logprobs_are_vllms(gateway: Gateway) -> None:
    ids = tokens_of(gateway, TEXT)
    found = complete(gateway, prompt=TEXT, prompt_logprobs=3)["choices"][0]["prompt_logprobs"]
    assert len(found) == len(ids)
    assert found[0] is None
    for token, line in zip(ids[1:], found[1:], strict=True):
        own = line[str(token)]
        assert len(line) == (3 if own["rank"] <= 3 else 4)
        assert all((one["logprob"] > own["logprob"]) == (one["rank"] < own["rank"]) for one in line.values())
        assert all(isinstance(one["decoded_token"], str) for one in line.values())
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "prompt_logprobs": 0}
    chat = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("of_prompt", "of_tokens"), [(2, 5), (5, 2), (0, 3)])
def test_each_list_has_the_alternatives_that_it_was_asked_for(gateway: Gateway, of_prompt: int, of_tokens: int) -> None:
    def tokens(tops: list[dict[str, Any] | None]) -> list[set[str]]:
        return [set(top or ()) for top in tops]

    both = {"prompt_logprobs": of_prompt, "logprobs": of_tokens, "echo": True, "n": 2}
    alone = complete(gateway, prompt=TEXT, prompt_logprobs=of_prompt)["choices"][0]["prompt_logprobs"]
    echoed = complete(gateway, prompt=TEXT, logprobs=of_tokens, echo=True)["choices"][0]["logprobs"]
    for choice in complete(gateway, prompt=TEXT, **both)["choices"]:
        assert tokens(choice["prompt_logprobs"]) == tokens(alone)
        assert tokens(choice["logprobs"]["top_logprobs"]) == tokens(echoed["top_logprobs"])


def test_scoring_reads_no_cache_and_fills_it(gateway: Gateway) -> None:
    text = "scored, then asked about " * 12
    first = complete(gateway, prompt=text, prompt_logprobs=0)
    again = complete(gateway, prompt=text, prompt_logprobs=0)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["prompt_logprobs"] == first["choices"][0]["prompt_logprobs"]
    assert complete(gateway, prompt=text)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("option", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 2}, "min_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": "perhaps"}, "echo"),
    ],
)
def test_bad_values_are_named(gateway: Gateway, option: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.post("/completions", body={"prompt": "x", **option}, cast_to=object)
    assert caught.value.param == param


def test_grpc_has_it_too(two: Node) -> None:
    client = two.client(0)
    ids = client.tokenize(TEXT)
    found = client.generate(TEXT, max_tokens=1, echo=True, prompt_logprobs=1)
    assert found.prompt_text == TEXT
    assert [one.token_id for one in found.prompt_logprobs] == ids
    assert found.prompt_logprobs[0].rank == 0
    assert all(one.rank >= 1 and len(one.top) == 1 for one in found.prompt_logprobs[1:])
    *_, last = client.stream(TEXT, max_tokens=3, echo=True, prompt_logprobs=1, logprobs=1)
    assert last.final is not None
    assert last.final.prompt_logprobs == found.prompt_logprobs
    assert last.final.prompt_text == TEXT
    assert len(last.final.logprobs) == len(last.final.token_ids)
