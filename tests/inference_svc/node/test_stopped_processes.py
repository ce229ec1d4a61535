"""A daemon and a worker that stand still for half a minute, as under a debugger, a frozen disk or a paused VM."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.inference_svc.node.served import Served

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
STOPPED_SECONDS = 30.0
PROMPTS = [f"{i} everything stood still for a while " * 12 for i in range(3)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    node = Served(tmp_path, workers=1)
    try:
        yield node
    finally:
        node.end()


def ask(node: Served, prompt: str, **more: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{node.url}/v1/completions", json=body, timeout=120)


def answer_of(answer: httpx.Response) -> tuple[str, int]:
    """Return the text and the cached tokens."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["text"], int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def stats(node: Served) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.run("cache", "stats", "--json").stdout)
    return found


def sentences(node: Served, word: str) -> list[str]:
    """Return the log's lines from warnings on that have a word."""
    lines = (node.folder / "log").read_text().splitlines()
    return [line for line in lines if word in line and ("warning" in line or "error" in line)]


def test_a_daemon_that_stands_still_costs_one_request_its_timeout_and_no_chunk(served: Served) -> None:
    expected = [answer_of(ask(served, prompt))[0] for prompt in PROMPTS]
    served.until(lambda: stats(served)["pending_writes"] == 0 and stats(served)["durable_chunks"] >= len(PROMPTS))
    chunks = stats(served)["chunks"]
    (guardian,) = served.children("cache_daemon")
    (daemon,) = guardian.children()
    daemon.send_signal(signal.SIGSTOP)
    slowest, began, asked = 0.0, time.monotonic(), 0
    try:
        while time.monotonic() - began < STOPPED_SECONDS:
            sent = time.monotonic()
            for number, prompt in enumerate(PROMPTS):
                assert answer_of(ask(served, prompt))[0] == expected[number]
            text, _ = answer_of(ask(served, f"{asked} is new, and cannot be stored now " * 12))
            assert text
            slowest, asked = max(slowest, time.monotonic() - sent), asked + 1
            time.sleep(0.2)
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert slowest < 8.0, "four requests, of which one waits for the daemon"
    served.until(lambda: served.run("status").returncode == 0)
    served.replace_worker()  # so that only the daemon has the prompts
    for number, prompt in enumerate(PROMPTS):
        text, cached = answer_of(ask(served, prompt))
        assert (text, cached > 100) == (expected[number], True), "no chunk was lost"
    after = stats(served)
    assert after["chunks"] >= chunks
    assert after["corrupt_chunks"] == 0
    assert served.children("cache_daemon") == [guardian]
    assert "Traceback" not in (served.folder / "log").read_text()


def test_a_worker_that_stands_still_goes_on_where_it_was_and_who_cannot_wait_is_told_in_a_sentence(
    served: Served,
) -> None:
    expected = [answer_of(ask(served, prompt))[0] for prompt in PROMPTS]
    long = {"prompt": "a long one", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    whole = answer_of(ask(served, **long))[0]
    (worker,) = served.children("--name=worker-0")
    first, parts, ended = threading.Event(), list[str](), threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=long | {"stream": True}, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line[6:])["choices"][0]["text"])
                    first.set()
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(60)
    worker.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert not ended.wait(5)  # and the gateway has noticed it
    answers: list[tuple[httpx.Response, float]] = []

    def wait_for_it() -> None:
        sent = time.monotonic()
        answers.append((ask(served, PROMPTS[0]), time.monotonic() - sent))

    waiting = [threading.Thread(target=wait_for_it) for _ in range(3)]
    for thread in waiting:
        thread.start()
    time.sleep(STOPPED_SECONDS - (time.monotonic() - began))
    worker.send_signal(signal.SIGCONT)
    for thread in waiting:
        thread.join(60)
    for answer, seconds in answers:
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["message"] == "no inference worker is up; try again in a moment"
        assert 10 < seconds < 25, "--worker-wait-seconds"
    assert len(answers) == 3
    assert ended.wait(60)
    assert "".join(parts) == whole, "the stream went on where it was"
    served.until(lambda: served.run("status").returncode == 0)
    assert served.children("--name=worker-0") == [worker], "it was not killed: it may be silent for a minute"
    for number, prompt in enumerate(PROMPTS):
        text, cached = answer_of(ask(served, prompt))
        assert (text, cached > 100) == (expected[number], True)
    found = stats(served)
    assert (found["leases"], found["reservations"], found["corrupt_chunks"]) == (0, 0, 0)
    assert "Traceback" not in (served.folder / "log").read_text()
