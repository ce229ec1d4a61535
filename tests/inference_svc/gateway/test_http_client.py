"""``kvsidecar chat`` and ``generate`` with ``--url``: over HTTP, to a node on another machine."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kvsidecar.cli.http_client import HttpClient
from kvsidecar.cli.root_command import app
from kvsidecar.errors import InvalidRequest, KVSidecarError, Unauthenticated, Unavailable, UnknownModel
from typer.testing import CliRunner

from benchmarks.node import Node, free_port
from tests.inference_svc.gateway.conftest import Gateway


def run(*arguments: str, said: str | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=said, env={"COLUMNS": "200"})


@pytest.mark.parametrize("behind", ["", "/", "/v1", "/v1/"])
def test_a_text_goes_on_as_at_a_worker(gateway: Gateway, two: Node, behind: str) -> None:
    options = ("generate", "hello there, ", "--max-tokens", "6")
    over_http, at_worker = (
        run(*options, *where)
        for where in (("--url", f"{gateway.url}{behind}"), ("--worker", str(two.worker_socket(0))))
    )
    assert over_http.exit_code == at_worker.exit_code == 0, over_http.output
    assert "from the cache; first token after" in over_http.output
    # What it cost comes last, in a line of its own that a narrow terminal breaks.
    of_costs = r"\n(?=\d+ prompt tokens)"
    (text, costs), (expected, _) = (re.split(of_costs, done.output) for done in (over_http, at_worker))
    assert text == expected
    assert "6 tokens in" in costs


def test_a_conversation_goes_on_and_an_adapter_that_is_none_is_named(gateway: Gateway) -> None:
    done = run("chat", "--url", gateway.url, "--max-tokens", "4", "--system", "be kind " * 30, said="hello\nagain\n\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("prompt tokens") == 2
    assert "for tests and no assistant" in done.output
    done = run("chat", "--url", gateway.url, "--model", "other", said="hello\n\n")
    assert isinstance(done.exception, UnknownModel)


def test_an_answer_that_nobody_reads_on_ends_at_the_worker(gateway: Gateway, two: Node) -> None:
    def counted() -> tuple[int, int]:
        stats = [two.client(i).stats() for i in range(2)]
        return sum(s.cancelled for s in stats), sum(s.running + s.waiting for s in stats)

    before, _ = counted()
    with HttpClient(gateway.url) as client:
        for seed in range(20):  # one that ends by itself cancels nothing
            parts = client.stream([{"role": "user", "content": "tell"}], max_tokens=1500, temperature=1.0, seed=seed)
            next(parts)
            parts.close()
    deadline = time.monotonic() + 60
    while counted()[1] or counted()[0] == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_keys_are_sent_and_asked_for(locked: Gateway) -> None:
    done = run("generate", "hello", "--url", locked.url)
    assert isinstance(done.exception, Unauthenticated)
    done = run("generate", "hello", "--url", locked.url, "--max-tokens", "2", "--api-key", "guest")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--url", "localhost:8000"), "write it like http://HOST:8000"),
        (("--url", "http://x:8000", "--worker", "x:1"), "give --worker or --url, not both"),
        (("--url", "http://x:port"), "cannot be used"),
        (("--url", "http://localhost:8000", "--api-key", "\u20ac"), "cannot be used"),
    ],
)
def test_what_cannot_be_asked_is_said(given: tuple[str, ...], said: str) -> None:
    done = run("generate", "hello", *given)
    assert isinstance(done.exception, InvalidRequest), done.output
    assert said in str(done.exception)


def test_where_nobody_listens_one_sentence_says_so() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = run("chat", "--url", url)
    assert isinstance(done.exception, Unavailable)
    assert str(done.exception).startswith(f"{url} does not answer")


@contextmanager
def saying(sent: bytes) -> Iterator[HttpClient]:
    """A client of a server that takes one request, whatever it is, and says this."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as asker:
                asker.recv(65536)
                asker.sendall(sent)
                asker.shutdown(socket.SHUT_WR)
                while asker.recv(65536):  # closed with something unread, it would be reset
                    pass

        asked = threading.Thread(target=answer)
        asked.start()
        with HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}") as client:
            yield client
        asked.join(30)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "nothing that a gateway says"),
        (b"HTTP/1.1 502 Bad\r\n\r\n", "it answers 502"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "serves no model yet"),
        (b"SSH-2.0\r\n", "does not answer"),
    ],
)
def test_what_is_no_gateway_is_said_to_be_none(sent: bytes, said: str) -> None:
    with saying(sent) as client, pytest.raises(KVSidecarError) as told:
        client.model()
    assert said in str(told.value)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\n', "broke off"),
        (b'data: {"error": {"message": "too much"}}\n\n', "too much"),
        (b"data: nonsense\n\n", "nothing that a gateway says"),
        (b"data: 5\n\n", "nothing that a gateway says"),
        (b'data: {"choices": null}\n\n', "broke off"),
        (b'data: {"choices": [5]}\n\n', "nothing that a gateway says"),
        (b'data: {"choices": {"text": "a"}}\n\n', "nothing that a gateway says"),
    ],
)
def test_an_answer_that_is_cut_or_none_is_said_to_be(events: bytes, said: str) -> None:
    with (
        saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + events) as client,
        pytest.raises(KVSidecarError) as told,
    ):
        list(client.stream("x", max_tokens=1, model="m"))
    assert said in str(told.value)


def test_a_text_may_contain_other_separators_of_lines() -> None:
    texts = ("a\u2028b", "\x85c")
    events = [{"choices": [{"text": text}]} for text in texts]
    events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
    sent = "".join(["HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", *lines, "data: [DONE]\n\n"])
    with saying(sent.encode()) as client:
        assert "".join(part.text for part in client.stream("x", max_tokens=2, model="m")) == "".join(texts)
