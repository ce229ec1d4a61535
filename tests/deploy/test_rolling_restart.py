"""Rolling restart of a node's processes under long streams."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.deploy.releases import PROMPTS, MixedNode, Release

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(3000)]
STREAMS, SECONDS = 32, 60.0
MARGIN = 1.25  # of the measured speed
# Longer than a stream on a machine that does much else; a drain ends when its last stream ends.
PATIENT = {"KVSIDECAR_WORKER_DRAIN_SECONDS": "900", "KVSIDECAR_GATEWAY_DRAIN_SECONDS": "900"}


@dataclass
class Streams:
    """Clients that read one stream after another, concurrently, until they are told to stop."""

    node: MixedNode
    max_tokens: int
    seconds: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._follow, args=(number,)) for number in range(STREAMS)]
        for thread in threads:
            thread.start()
        return threads

    def _follow(self, number: int) -> None:
        for turn in itertools.count(number):
            began = time.monotonic()
            try:
                last = self._read(PROMPTS[turn % len(PROMPTS)])
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                self.broken.append(f"{type(error).__name__}: {error}"[:300])
            else:
                self.seconds.append(time.monotonic() - began)
                if last != self.max_tokens:
                    self.broken.append(f"{last} of {self.max_tokens} tokens")
            if self.over.is_set():
                return

    def _read(self, prompt: str) -> int:
        """Read a stream to its end; return its tokens."""
        body = {
            "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        with httpx.stream("POST", f"{self.node.url}/v1/completions", json=body, timeout=900) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1:] == ["[DONE]"], lines[-1:]
        return int(json.loads(lines[-2])["usage"]["completion_tokens"])


def tokens_per_second(node: MixedNode) -> float:
    """Measure the speed of one stream among all of them, without its prefill."""
    took = []
    for max_tokens in (8, 40):
        probe = Streams(node, max_tokens)
        probe.over.set()
        for thread in probe.run():
            thread.join()
        assert not probe.broken
        took.append(sum(probe.seconds) / STREAMS)
    return 32 / max(0.1, took[1] - took[0])


def test_no_stream_breaks_while_every_process_is_replaced(tmp_path: Path) -> None:
    release = Release("this", settings=PATIENT)
    node = MixedNode(tmp_path / "node", release)
    try:
        tokens_per_second(node)  # fills the cache
        streams = Streams(node, min(3000, int(tokens_per_second(node) * SECONDS * MARGIN)))
        threads = streams.run()
        for process in ("daemon", "worker-0", "worker-1", "gateway"):
            node.replace(process, release)
        streams.over.set()
        for thread in threads:
            thread.join()
        long = sum(seconds >= SECONDS for seconds in streams.seconds)
        print(
            f"{len(streams.seconds)} streams, {long} of them of {SECONDS:.0f} s or more, {len(streams.broken)} broken"
        )
        assert not streams.broken, (streams.broken[:5], node.log())
        assert long >= STREAMS
    finally:
        node.end()
