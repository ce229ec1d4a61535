"""When answers end and what they show, as vLLM's users ask for it: alone, together, streamed, guessed, over gRPC."""

from __future__ import annotations

import re
from math import inf
from typing import Any

import httpx
import openai
import pytest
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import InvalidRequest

from benchmarks.node import Node
from tests.inference_svc.gateway.conftest import Gateway

TEXT = "one two three four five six seven one two three"
LONG: dict[str, Any] = {"prompt": TEXT, "max_tokens": 24, "temperature": 1, "seed": 7, "ignore_eos": True}
SALT = b"of times"


def complete(gateway: Gateway, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = gateway.post("/v1/completions", **{**LONG, **options})["choices"][0]
    return found


def streamed(gateway: Gateway, **options: Any) -> dict[str, Any]:
    """The same, put together from a stream."""
    whole: dict[str, Any] = {"text": "", "finish_reason": None}
    for part in gateway.client.post(
        "/completions", body={**LONG, **options, "stream": True}, cast_to=object, stream=True,
        stream_cls=openai.Stream[Any],
    ):  # fmt: skip
        choice = part["choices"][0]
        whole |= {"text": whole["text"] + choice["text"], "finish_reason": choice["finish_reason"]}
        whole["stop_reason"] = choice.get("stop_reason")
    return whole


def tokens(gateway: Gateway, text: str) -> list[int]:
    found: list[int] = gateway.post("/tokenize", prompt=text)["tokens"]
    return found


@pytest.fixture(scope="module")
def plain(gateway: Gateway) -> list[str]:
    """The texts of an answer's tokens."""
    found: list[str] = complete(gateway, logprobs=0)["logprobs"]["tokens"]
    return found


@pytest.fixture(scope="module")
def rare(gateway: Gateway, plain: list[str]) -> tuple[int, int]:
    """A token of that answer, and where it first stands: not at its beginning."""
    for at in range(3, 16):
        ids = tokens(gateway, plain[at])
        if (
            plain[at] not in plain[:at]
            and len(ids) == 1
            and gateway.post("/detokenize", tokens=ids)["prompt"] == plain[at]
        ):
            return ids[0], at
    pytest.fail("the answer repeats itself at once")


@pytest.mark.parametrize("ask", [complete, streamed])
def test_a_token_ends_the_answer_and_is_no_part_of_it(
    gateway: Gateway, plain: list[str], rare: tuple[int, int], ask: Any
) -> None:
    token, at = rare
    found = ask(gateway, stop_token_ids=[token, 4000])
    assert found["text"] == "".join(plain[:at])
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", token)
    kept = ask(gateway, stop_token_ids=[token], include_stop_str_in_output=True)
    assert kept["text"] == "".join(plain[: at + 1])


@pytest.mark.parametrize("ask", [complete, streamed])
def test_a_stop_string_may_be_shown(gateway: Gateway, plain: list[str], ask: Any) -> None:
    text = "".join(plain)
    stop = text[4:7]
    end = text.find(stop)
    found = ask(gateway, stop=[stop])
    assert (found["text"], found["stop_reason"]) == (text[:end], stop)
    shown = ask(gateway, stop=[stop], include_stop_str_in_output=True)
    assert (shown["text"], shown["stop_reason"], shown["finish_reason"]) == (text[: end + 3], stop, "stop")
    assert ask(gateway)["stop_reason"] is None


@pytest.mark.parametrize("ask", [complete, streamed])
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_an_answer_does_not_end_before_it_may(
    gateway: Gateway, plain: list[str], rare: tuple[int, int], ask: Any, speculation: str
) -> None:
    token, at = rare
    options: dict[str, Any] = {"stop_token_ids": [token], "min_tokens": at + 1, "speculation": speculation}
    whole = complete(gateway, **options, logprobs=0)
    assert plain[at] not in whole["logprobs"]["tokens"][: at + 1]
    assert len(whole["logprobs"]["tokens"]) > at + 1
    assert ask(gateway, **options)["text"] == whole["text"]
    stop = "".join(plain)[4:7]
    late = ask(gateway, stop=[stop], min_tokens=20, speculation=speculation)
    assert late["text"].startswith("".join(plain[:20]))


def test_a_grammar_that_is_at_its_end_ends_the_answer_all_the_same(gateway: Gateway) -> None:
    for speculation in ("off", "ngram"):
        found = complete(
            gateway, guided_regex="ab?", min_tokens=20, ignore_eos=False, logit_bias=None, speculation=speculation
        )
        assert re.fullmatch("ab?", found["text"])
        assert found["finish_reason"] == "stop"
    for ignored in (False, True):
        longer = complete(
            gateway, guided_regex="[a-z]{1,40}", min_tokens=12, max_tokens=40, ignore_eos=ignored, logprobs=0
        )
        assert len(longer["text"]) >= len(longer["logprobs"]["tokens"]) >= 12
    end = complete(gateway, allowed_token_ids=[tokens(gateway, "a")[0]], min_tokens=5, max_tokens=6)
    assert end["text"] == "aaaaaa"


def test_end_tokens_alone_are_drawn_where_nothing_else_may_be(gateway: Gateway) -> None:
    (token,) = tokens(gateway, "a")
    found = complete(gateway, allowed_token_ids=[token], stop_token_ids=[token], min_tokens=9)
    assert (found["text"], found["stop_reason"]) == ("", token)


def test_every_choice_and_prompt_ends_for_itself(gateway: Gateway, rare: tuple[int, int]) -> None:
    body = {**LONG, "prompt": [TEXT, "hello"], "n": 3, "temperature": 1, "seed": 5, "ignore_eos": False}
    found = gateway.post("/v1/completions", **body, stop_token_ids=[rare[0]], min_tokens=4, logprobs=0, echo=True)
    assert len(found["choices"]) == 6
    for choice in found["choices"]:
        assert choice["text"].startswith(TEXT if choice["index"] < 3 else "hello")
        read = len(tokens(gateway, TEXT if choice["index"] < 3 else "hello"))
        assert len(choice["logprobs"]["tokens"]) - read > 4 or choice["finish_reason"] == "length"


def test_special_tokens_are_shown_on_request(gateway: Gateway) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    prompt = gateway.post("/tokenize", **body)["tokens"]
    texts = {token: gateway.post("/detokenize", tokens=[token])["prompt"] for token in prompt}
    special, text = next((token, text) for token, text in texts.items() if text.startswith("<|"))
    only = {"allowed_token_ids": [special], "max_tokens": 2}
    assert complete(gateway, **only)["text"] == ""
    assert complete(gateway, **only, skip_special_tokens=False)["text"] == text * 2


def test_only_the_end_of_a_prompt_is_read_on_request(gateway: Gateway) -> None:
    ids = [7] * 6000
    body: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
    kept = gateway.post("/v1/completions", prompt=[*ids, 100, 200, 300], truncate_prompt_tokens=3, **body)
    assert kept["usage"]["prompt_tokens"] == 3
    same = gateway.post("/v1/completions", prompt=[100, 200, 300], **body)
    assert kept["choices"][0]["text"] == same["choices"][0]["text"]
    chat = gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": TEXT}], max_tokens=1,
                truncate_prompt_tokens=4)  # fmt: skip
    assert chat["usage"]["prompt_tokens"] == 4
    for options in ({"truncation_side": "right"}, {"truncate": "right"}):
        first = gateway.post("/v1/completions", prompt=[100, 200, 300, *ids], return_token_ids=True,
                     truncate_prompt_tokens=3, **body, **options)  # fmt: skip
        assert first["choices"][0]["prompt_token_ids"] == [100, 200, 300]
    both = gateway.post("/v1/completions", prompt=[100, 200, *ids, 300, 400], truncate="middle",
                truncate_prompt_tokens=4, **body)  # fmt: skip
    same = gateway.post("/v1/completions", prompt=[100, 200, 300, 400], **body)
    assert both["usage"]["prompt_tokens"] == 4
    assert both["choices"][0]["text"] == same["choices"][0]["text"]


def test_how_an_answer_begins(gateway: Gateway) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, the"}]

    def count(**options: Any) -> int:
        return int(gateway.post("/tokenize", messages=said, **options)["count"])

    assert (
        count(add_generation_prompt=False, continue_final_message=True) < count(add_generation_prompt=False) < count()
    )
    answer = gateway.post(
        "/v1/chat/completions", messages=said, max_tokens=1, add_generation_prompt=False,
        continue_final_message=True, chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == count(add_generation_prompt=False, continue_final_message=True)


NEUTRAL = {"use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "spaces_between_special_tokens": True}


def test_what_changes_nothing_passes(gateway: Gateway, plain: list[str]) -> None:
    assert complete(gateway, **NEUTRAL, min_tokens=0, skip_special_tokens=True, add_special_tokens=True)["text"] == (
        "".join(plain)
    )


@pytest.mark.parametrize(
    ("option", "param", "said"),
    [
        ({"stop_token_ids": [5000]}, "stop_token_ids", "outside the vocabulary of 4096"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
        ({"stop_token_ids": [1] * 200}, "stop_token_ids", "at most 128"),
        ({"stop_token_ids": "7"}, "stop_token_ids", "list"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most 8"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "allowed are 1 and more"),
        ({"truncate": "top"}, "truncate", "'left', 'middle' or 'right'"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"truncate_prompt_tokens": 2**30, "prompt": [7] * 6000}, None, "the prompt is too long: it has 6000 tokens"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"bad_words": ["x"]}, "bad_words", "not supported"),
        ({"temprature": 1}, "temprature", r"\(did you mean temperature\?\); leave it out"),
        ({"prompt": [1, "x"]}, "prompt.1", "prompt.1 is 'x': input should be a valid integer"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", r"\(did you mean regex\?\)"),
        ({"response_format": {"type": "text", "xyz": 1}}, "response_format.xyz", "option of this server; leave it out"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_named(
    gateway: Gateway, option: dict[str, Any], param: str | None, said: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        gateway.client.post("/completions", body={"prompt": "x", **option, "stream": stream}, cast_to=object)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("option", "param", "said"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages is no argument"),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs", "dictionary"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "desciption": "x"}}]},
            "tools.0.function.desciption",
            r"\(did you mean description\?\)",
        ),
    ],
)
def test_bad_values_of_chats_are_named(gateway: Gateway, option: dict[str, Any], param: str, said: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **option}
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        gateway.client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500}}
SPOKEN = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.mark.parametrize(
    ("path", "body", "part", "kind"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]}, "messages.0", "image_url"),
        ("/chat/completions", {"messages": [{"role": "user", "content": [SPOKEN]}]}, "messages.0", "input_audio"),
        ("/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0", "input_image"),
    ],
)
def test_pictures_and_sounds_are_refused_in_one_sentence(
    gateway: Gateway, path: str, body: dict[str, Any], part: str, kind: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.post(path, body=body, cast_to=object)
    assert caught.value.body == {
        "message": f"{part}.content.0 is of the type '{kind}'; the models of this server read text alone",
        "type": "invalid_request_error", "param": f"{part}.content.0", "code": "unsupported_parameter",
    }  # fmt: skip


def test_what_is_wrong_with_a_part_is_said_of_it(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": 5}]}]
    with pytest.raises(openai.BadRequestError, match=r"messages.0.content.0.text is 5: input should be a valid string"):
        gateway.client.post("/chat/completions", body={"messages": messages}, cast_to=object)


def test_a_path_that_is_like_one_is_asked_about(gateway: Gateway) -> None:
    said = httpx.post(f"{gateway.url}/chat/completions", json={}).json()["error"]["message"]
    assert said == "/chat/completions is not served here (did you mean /v1/chat/completions?)"
    assert len(httpx.get(f"{gateway.url}/{'x' * 5000}").text) < 300


def test_grpc_has_them_too(two: Node, plain: list[str], rare: tuple[int, int]) -> None:
    token, at = rare
    options: Any = {"max_tokens": 24, "temperature": 1, "seed": 7, "ignore_eos": True, "stop_token_ids": [token]}
    whole = two.client(0).generate(TEXT, **options)
    assert (whole.text, whole.stopped_by) == ("".join(plain[:at]), token)
    *_, last = two.client(0).stream(TEXT, **options, include_stop=True)
    assert last.final is not None
    assert (last.final.text, last.final.stopped_by) == ("".join(plain[: at + 1]), token)
    options |= {"stop_token_ids": [], "stop": ["".join(plain)[4:7]]}
    stopped = two.client(0).generate(TEXT, **options)
    assert stopped.stopped_by == "".join(plain)[4:7]
    late = two.client(0).generate(TEXT, **options, min_tokens=24, truncate_prompt_tokens=50, show_special_tokens=True)
    assert late.generated_tokens == 24


def kept(node: Node) -> list[float]:
    """Return the remaining TTL of each chunk of this test, in seconds; infinite without a TTL."""
    node.settle()
    request = cache_pb2.ListRequest(namespace=node.client(0).model().namespace, tenant_salt=SALT, page_size=1000)
    with node.cache_channel() as channel:
        chunks = CacheServiceStub(channel).List(request, timeout=60).chunks
    return [chunk.ttl_seconds if chunk.HasField("ttl_seconds") else inf for chunk in chunks]


def test_a_request_says_how_long_it_is_of_use(gateway: Gateway, two: Node) -> None:
    """By HTTP, by gRPC and by reading ahead, each of a text of its own."""
    words, salt = "a text that nobody has read and nobody reads again ", SALT.decode()
    one = {"prompt": "one " + words * 9, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
    gateway.post("/v1/completions", **one, cache_ttl_seconds=1000)
    two.client(0).generate("two " + words * 9, max_tokens=2, cache_ttl_seconds=2000, tenant_salt=SALT)
    gateway.post("/kvsidecar/v1/warm", prompt="three " + words * 9, cache_ttl_seconds=3000, cache_salt=salt)
    found = {next(most for most in (1000, 2000, 3000) if left <= most) for left in kept(two)}
    assert found == {1000, 2000, 3000}
    gateway.post("/v1/completions", **one)
    assert min(kept(two)) > 1000, "who asks for no time asks for as long as there is room"
    for wrong in (0, 2_592_001):
        with pytest.raises(InvalidRequest, match=f"cache_ttl_seconds is {wrong}; allowed are 1 to 2592000"):
            two.client(0).generate("x", max_tokens=1, cache_ttl_seconds=wrong)
        with pytest.raises(InvalidRequest, match=f"cache_ttl_seconds is {wrong}; allowed are 1 to 2592000"):
            two.client(0).warm("x", cache_ttl_seconds=wrong)
