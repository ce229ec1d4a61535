"""Draining: readiness fails first, streams finish, and streams that take too long end with an error."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.inference_svc.node.served import Served

pytestmark = pytest.mark.timeout(500)
_LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "ignore_eos": True,
    "n": 8,
}


class Stream:
    """A streamed answer that a thread reads to its end."""

    def __init__(self, served: Served, **options: Any) -> None:
        self.events: list[Any] = []
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(served.url, _LONG | options))
        self._thread.start()
        assert self.begun.wait(60)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    text = line.removeprefix("data: ")
                    self.events.append(text if text == "[DONE]" else json.loads(text))
                    self.begun.set()

    def wait(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()


def test_readiness_fails_while_a_running_stream_and_late_requests_finish(tmp_path: Path) -> None:
    served = Served(tmp_path, workers=1, settings={"KVSIDECAR_DRAIN_SECONDS": "150"})
    try:
        assert [httpx.get(f"{served.url}{path}").status_code for path in ("/livez", "/readyz")] == [200, 200]
        stream = Stream(served, max_tokens=1200)
        served.process.terminate()
        served.until(lambda: httpx.get(f"{served.url}/readyz").status_code == 503)
        assert httpx.get(f"{served.url}/readyz").json()["status"] == "draining"
        assert httpx.get(f"{served.url}/livez").status_code == 200
        assert served.ask().status_code == 200, "a load balancer has not heard of it yet"
        stream.wait()
        assert stream.events[-1] == "[DONE]"
        began = time.monotonic()
        assert served.process.wait(60) == 0
        assert time.monotonic() - began < 40, "it waits for nothing else"
    finally:
        served.end()


@pytest.mark.parametrize("by", ["time", "a second signal"])
def test_a_stream_that_is_too_long_ends_with_one_sentence_and_counts_as_aborted(tmp_path: Path, by: str) -> None:
    seconds = {"time": "1", "a second signal": "300"}[by]
    served = Served(tmp_path, workers=1, settings={"KVSIDECAR_DRAIN_SECONDS": seconds})
    try:
        stream = Stream(served)
        served.process.terminate()
        served.until(lambda: "draining" in served.text())
        if by != "time":
            served.process.terminate()
        stream.wait()
        error = stream.events[-1]["error"]
        assert error["message"] == "the server shuts down and cannot finish this answer; send the request again"
        assert error["code"] == "unavailable"
        assert served.process.wait(60) == 0
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if '"aborted"' in line]
        assert [(line["event"], line["level"]) for line in lines] == [("request", "error")]
    finally:
        served.end()


def test_a_worker_that_is_killed_while_it_drains_ends_its_streams_with_one_sentence(tmp_path: Path) -> None:
    served = Served(tmp_path, workers=2, settings={"KVSIDECAR_DRAIN_SECONDS": "60"})
    try:
        stream = Stream(served)  # so many choices that both workers have some
        busy = served.children(" worker ")[0]
        busy.terminate()
        served.until(lambda: '"worker is down"' in served.text())
        time.sleep(2)  # past the refusal of new calls
        busy.kill()
        stream.wait()
        assert stream.events[-1]["error"]["message"] == "the worker broke off its answer; send the request again"
        assert served.ask().status_code == 200
        served.until(lambda: served.health().get("workers_up") == 2, 120)
    finally:
        served.end()
