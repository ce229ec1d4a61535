"""``kvsidecar bench`` and ``kvsidecar cost`` against a node."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvsidecar.bench.shared_prefix_prompts import Shape, prompts
from kvsidecar.cli.cost import Savings, sentences
from kvsidecar.cli.root_command import app
from kvsidecar.errors import InvalidRequest, KVSidecarError
from typer.testing import CliRunner

from benchmarks.condition_wait import until
from benchmarks.node import Node, free_port
from tests.inference_svc.gateway.conftest import Gateway, of_node

SMALL = ("--requests", "4", "--prefixes", "2", "--prefix-words", "150", "--question-words", "5", "--max-tokens", "4")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def bench(url: str, *further: str) -> Any:
    return run("bench", "--url", url, *SMALL, *further)


def test_what_begins_alike_is_found_again(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = bench(f"{gateway.url}/v1", "--json", "--ignore-eos", "--out", str(file))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads(file.read_text())
    assert found["asked"]["model"] == "demo"
    first, again = found["first"], found["again"]
    assert (first["requests"], again["requests"]) == (2, 4)
    assert (first["failed"], again["failed"]) == (0, 0)
    # One of the two beginnings may not be stored yet when another worker is asked.
    assert again["cached_share"] > 0.4 > 0.2 > first["cached_share"]
    assert again["generated_tokens"] == 4 * 4
    assert 0 < again["ttft_ms"]["p50"] <= again["whole_ms"]["p99"]
    assert found["ttft_speedup"] == pytest.approx(first["ttft_ms"]["p50"] / again["ttft_ms"]["p50"], rel=0.01)


def test_people_get_a_table(gateway: Gateway) -> None:
    done = bench(f"{gateway.url}/v1", "--completions", "--seed", "7")
    assert done.exit_code == 0, done.output
    assert "beginning read before" in done.stdout
    assert "4, 0" in done.stdout


def test_prompts_share_only_their_beginnings() -> None:
    shape = Shape(prefixes=3, prefix_words=50, question_words=10)
    firsts, others = prompts(shape, 9, seed=1)
    beginnings = [" ".join(p.text.split()[:50]) for p in firsts]
    assert len(set(beginnings)) == 3
    assert [sum(p.text.startswith(b) for p in others) for b in beginnings] == [3, 3, 3]
    assert len({p.text for p in [*firsts, *others]}) == 12
    assert prompts(shape, 9, seed=1) == (firsts, others)


class _BreaksOff(BaseHTTPRequestHandler):
    """Server whose streams break off, except every third one."""

    asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        event = {"choices": [{"delta": {"content": "x"}}], "usage": None}
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        _BreaksOff.asked += 1
        if _BreaksOff.asked % 3 == 0:
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log to the output of the test."""


@contextmanager
def served(by: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), by) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def breaks_off() -> Iterator[str]:
    with served(_BreaksOff) as url:
        yield url


def test_a_broken_answer_is_counted_as_failed(breaks_off: str) -> None:
    done = bench(breaks_off, "--model", "m", "--json", "--concurrency", "1")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["first"]["failed"], found["again"]["failed"]) == (2, 2)
    assert found["again"]["reasons"] == {"the answer broke off": 2}
    assert found["again"]["cached_share"] is None


@contextmanager
def saying(events: bytes, models: bytes = b"") -> Iterator[str]:
    """URL of a server whose every streamed answer has these events, and whose list of models is this."""

    class Says(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(events + b"data: [DONE]\n\n")

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Do not log to the output of the test."""

    with served(Says) as url:
        yield url


def test_a_models_name_is_shown_as_it_is() -> None:
    with saying(b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n') as url:
        done = bench(url, "--model", "[/x]:ab:")
    assert f"[/x]:ab: at {url}" in done.stdout


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"error": "overloaded"}', "overloaded"),
        ('{"error": {"message": "too long"}}', "too long"),
        ('{"error": {"code": 5}}', "{'code': 5}"),
        ("[1]", "the server sent '[1]', which is no event of an answer"),
        ("5", "the server sent '5', which is no event of an answer"),
        ("nonsense", "the server sent 'nonsense', which is no event of an answer"),
        ('{"choices": [5]}', "the server sent '{\"choices\": [5]}', which is no event of an answer"),
        ('{"usage": [5]}', "the server sent '{\"usage\": [5]}', which is no event of an answer"),
    ],
)
def test_an_error_event_of_any_server_is_a_failed_request(event: str, said: str) -> None:
    with saying(f"data: {event}\n\n".encode()) as url:
        done = bench(url, "--model", "m", "--json")
    assert isinstance(done.exception, KVSidecarError), done.exception
    assert str(done.exception) == f"no request succeeded; the first said: {said}"
    assert json.loads(done.stdout)["again"]["reasons"] == {said: 4}


def test_an_event_may_have_null_for_an_empty_list() -> None:
    """Servers in Go encode an empty list as null."""
    text = b'data: {"choices": [{"delta": {"content": "x"}}], "error": null}\n\n'
    usage = b'data: {"choices": null, "usage": {"prompt_tokens": 7, "completion_tokens": 1}}\n\n'
    with saying(text + usage) as url:
        done = bench(url, "--model", "m", "--json")
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["again"]["prompt_tokens"] == 4 * 7


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (b'{"data": null}', "serves no model yet"),
        (b'{"data": [1]}', "is no list of models"),
        (b'{"data": {"id": 1}}', "is no list of models"),
        (b"[]", "is no list of models"),
    ],
)
def test_what_is_no_list_of_models_is_said_to_be_none(models: bytes, said: str) -> None:
    with saying(b"", models) as url:
        done = bench(url)
    assert isinstance(done.exception, KVSidecarError), done.exception
    assert said in str(done.exception)


@pytest.mark.parametrize("further", [(), ("--model", "m")])
def test_a_url_that_is_none_is_said_to_be_none(further: tuple[str, ...]) -> None:
    done = bench("http://[::1", *further)
    assert isinstance(done.exception, InvalidRequest), done.exception
    assert "'http://[::1' is no URL" in str(done.exception)


@pytest.mark.parametrize("out", ["", "none/x.json", "file/x.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(breaks_off: str, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    asked, log = _BreaksOff.asked, tmp_path / "log"
    log.write_text(json.dumps({"event": "request", "prompt_tokens": 5}))
    for what in (("--model", "m"), ("--replay", str(log))):
        done = bench(breaks_off, *what, "--out", str(tmp_path / out))
        assert isinstance(done.exception, InvalidRequest), done.output
        assert f"cannot write --out {tmp_path / out}" in str(done.exception)
    assert _BreaksOff.asked == asked
    assert not done.stdout


def test_results_are_printed_also_if_the_disk_is_full(breaks_off: str) -> None:
    done = bench(breaks_off, "--model", "m", "--json", "--concurrency", "1", "--out", "/dev/full")
    assert isinstance(done.exception, KVSidecarError), done.output
    assert "cannot write --out /dev/full: No space left on device" in str(done.exception)
    assert json.loads(done.stdout)["asked"]["model"] == "m"


def test_who_cannot_be_asked_is_named(locked: Gateway) -> None:
    nobody = f"http://127.0.0.1:{free_port()}/v1"
    for arguments, said in (
        ((nobody,), f"no answer from {nobody}"),
        (("localhost:8000/v1",), "must begin with http://"),
        ((f"{locked.url}/v1",), "401: the API key is missing or wrong"),
        ((f"{locked.url}/v1", "--api-key", "guest", "--model", "other"), "the model 'other' is not served here"),
    ):
        done = bench(*arguments)
        assert isinstance(done.exception, KVSidecarError), done.output
        assert said in str(done.exception)


def test_what_reuse_saves_is_said_in_time_and_money(gateway: Gateway, two: Node) -> None:
    text = "a text that is read twice " * 20
    for _ in range(2):
        gateway.client.completions.create(model="demo", prompt=text, max_tokens=2)
    deadline = time.monotonic() + 20
    while not two.cache_stats().cached_tokens:  # workers report every two seconds
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = two.cache_stats()
    where = ("--socket", str(two.cache_socket), "--worker", str(two.worker_socket(0)))
    done = run("cost", *where, "--hour-price", "3.6", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["cached_tokens"] >= before.cached_tokens
    assert 0 < found["share"] < 1
    assert 0 < found["prefill_s_per_token"] < 0.1
    assert found["saved_s"] == pytest.approx(found["cached_tokens"] * found["prefill_s_per_token"])
    assert found["money_per_day"] == pytest.approx(found["saved_s_per_day"] * 3.6 / 3600)
    assert "--hour-price" in run("cost", *where).stdout


def test_what_skips_the_cache_is_in_no_hit_ratio() -> None:
    """It could reuse nothing. Others count it by itself: what the command measures with, too."""
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB") as node:
        gateway = of_node(node)
        try:
            ask, text = gateway.client.completions.create, "a text that is read twice " * 20
            counted = [ask(model="demo", prompt=text, max_tokens=2).usage for _ in range(2)]
            until(lambda: node.cache_stats().prompts == 2)
            where = ("--socket", str(node.cache_socket), "--worker", str(node.worker_socket(0)))
            shares = [json.loads(run("cost", *where, "--json").stdout)["share"] for _ in range(2)]
            for option in ({"skip_cache": True}, {"prompt_logprobs": 0}):
                ask(model="demo", prompt="another text " * 30, max_tokens=2, extra_body=option)
            counted.append(ask(model="demo", prompt=text, max_tokens=2).usage)
            until(lambda: node.cache_stats().prompts >= 3)
            found, worker = node.cache_stats(), node.client().stats()
            shown = httpx.get(f"{gateway.url}/kvsidecar/v1/node").json()["reuse"]
            metrics = httpx.get(f"{gateway.url}/metrics").text
        finally:
            gateway.close()
    assert shares[0] == shares[1] > 0
    tokens = sum(usage.prompt_tokens for usage in counted if usage is not None)
    assert (found.prompts, found.prompt_tokens) == (3, tokens)
    assert (worker.requests, worker.skipping_requests) == (3 + 8, 8)
    assert worker.prompt_tokens == tokens + worker.skipping_tokens > tokens + 8
    assert sum(shown["prompt_tokens"]) <= tokens
    totals = dict(re.findall(r'vllm:(\w+)_total\{engine="0",.*\} (\S+)', metrics))
    assert float(totals["prompt_tokens"]) == worker.prompt_tokens
    assert float(totals["prefix_cache_queries"]) == tokens
    assert float(totals["external_prefix_cache_queries"]) == tokens - worker.resident_tokens


def test_costs_are_sentences() -> None:
    found = Savings(7200.0, 100, 200_000, 150_000, 0.002, 2.5)
    assert (found.share, found.saved_s, found.saved_s_per_day) == (0.75, 300.0, 3600.0)
    told = " ".join(sentences(found))
    assert "2 h 0 min ago workers served 100 prompts of 200,000 tokens; 75% of these" in told
    assert "reuse saved 5 min 0 s of prefill, and saves 1 h 0 min a day" in told
    assert "At 2.5 an hour that is 2.50 a day, 75.00 in 30 days." in told
